/** The page's language. A text is a pair [English, Chinese]; `say` picks one, so no text can lack a language. */

export type Text = readonly [en: string, zh: string];
export type Language = 'en' | 'zh';

const KEY = 'hotloop-language';

class Speech {
  language = $state<Language>('en');

  start(): void {
    let kept: string | null = null;
    try {
      kept = localStorage.getItem(KEY);
    } catch {
      kept = null; // storage switched off: the language is then the browser's at every visit
    }
    this.set(kept === 'zh' || kept === 'en' ? kept : navigator.language.startsWith('zh') ? 'zh' : 'en', false);
  }

  set(language: Language, keep = true): void {
    this.language = language;
    document.documentElement.lang = language === 'zh' ? 'zh-CN' : 'en';
    if (!keep) return;
    try {
      localStorage.setItem(KEY, language);
    } catch {
      return; // as above
    }
  }
}

export const speech = new Speech();

/** The text in the page's language, with {name} replaced by values. */
export function say(text: Text, values: Record<string, string | number> = {}): string {
  const chosen = speech.language === 'zh' ? text[1] : text[0];
  return chosen.replace(/\{(\w+)\}/g, (whole, name: string) => (name in values ? String(values[name]) : whole));
}
