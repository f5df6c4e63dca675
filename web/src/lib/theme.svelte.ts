/** Light or dark: the reader's choice if there was one, else the system's. */

const KEY = 'hotloop-theme';

class Theme {
  isDark = $state(false);

  start(): void {
    const system = matchMedia('(prefers-color-scheme: dark)');
    let kept: string | null = null;
    try {
      kept = localStorage.getItem(KEY);
    } catch {
      kept = null; // storage switched off: the system decides at every visit
    }
    this.#apply(kept === 'dark' || (kept !== 'light' && system.matches));
  }

  toggle(): void {
    this.#apply(!this.isDark);
    try {
      localStorage.setItem(KEY, this.isDark ? 'dark' : 'light');
    } catch {
      return; // as above
    }
  }

  #apply(isDark: boolean): void {
    this.isDark = isDark;
    document.documentElement.dataset['theme'] = isDark ? 'dark' : 'light';
  }
}

export const theme = new Theme();
