/** Ticks and the writing of numbers: tabular, a true minus sign, one decimal for GiB in pictures. */

const GIB = 1024 ** 3;
const MINUS = '−';

function withMinus(text: string): string {
  return text.startsWith('-') ? MINUS + text.slice(1) : text;
}

/** A number with a fixed count of decimals; "-0.0" is written "0.0". */
export function fixed(value: number, decimals: number): string {
  const text = value.toFixed(decimals);
  return withMinus(Number(text) === 0 && text.startsWith('-') ? text.slice(1) : text);
}

export function gib(bytes: number, decimals = 1): string {
  return fixed(bytes / GIB, decimals);
}

export function signed(value: number, decimals: number): string {
  const text = fixed(value, decimals);
  return Number(value.toFixed(decimals)) > 0 ? `+${text}` : text;
}

/** Whole number with thin groups of three: 1,397. */
export function whole(value: number): string {
  return withMinus(Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, ','));
}

/** A count with a decimal suffix: 743B, 3.9B, 54k, 128. */
export function count(value: number): string {
  for (const [size, suffix] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']] as const) {
    const scaled = value / size;
    if (scaled >= 1) return (scaled < 10 ? fixed(scaled, 1).replace(/\.0$/, '') : fixed(scaled, 0)) + suffix;
  }
  return fixed(value, 0);
}

/** Seconds as a person says them: 0.4 s, 12 s, 3 min 05 s, 2 h 04 min. */
export function seconds(value: number): string {
  if (value < 10) return `${fixed(value, 1)} s`;
  const total = Math.round(value);
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${String(total % 60).padStart(2, '0')} s`;
  return `${Math.floor(total / 3600)} h ${String(Math.floor((total % 3600) / 60)).padStart(2, '0')} min`;
}

export function percent(share: number, decimals = 0): string {
  return `${fixed(share * 100, decimals)} %`;
}

/** Up to four significant digits, for any metric: 0.0006, 1.24, 312. */
export function metric(value: number): string {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 100) return fixed(value, 0);
  if (size >= 10) return fixed(value, 1);
  if (size >= 0.1) return fixed(value, 2);
  if (size >= 0.0001) return fixed(value, 4);
  return withMinus(value.toExponential(1));
}

/** Round steps (1, 2, 5 times a power of ten) that cover [low, high] with about `wanted` intervals. */
export function ticks(low: number, high: number, wanted = 5): number[] {
  if (!(high > low)) return [low];
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? 10 * power;
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** The same for whole numbers such as rounds: no fractional ticks. */
export function wholeTicks(low: number, high: number, wanted = 6): number[] {
  return ticks(low, high, wanted).filter((t) => Number.isInteger(t) && t >= low && t <= high);
}
