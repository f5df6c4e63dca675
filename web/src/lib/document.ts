/** A small part of Markdown to blocks of plain text: headings, paragraphs, lists, code, links. Never markup. */

export interface Span {
  text: string;
  isCode?: boolean;
  href?: string;
}

export type Block =
  | { kind: 'heading' | 'paragraph'; spans: Span[] }
  | { kind: 'formula'; text: string }
  | { kind: 'list'; items: Span[][] };

const INLINE = /`([^`]+)`|\[([^\]]+)\]\((https:\/\/[^\s)]+)\)/g;

export function parseSpans(text: string): Span[] {
  const spans: Span[] = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) spans.push({ text: text.slice(at, found.index) });
    if (found[1] !== undefined) spans.push({ text: found[1], isCode: true });
    else spans.push({ text: found[2]!, href: found[3]! });
    at = found.index + found[0].length;
  }
  if (at < text.length) spans.push({ text: text.slice(at) });
  return spans;
}

export function parseDocument(text: string): Block[] {
  const blocks: Block[] = [];
  let paragraph: string[] = [];
  let code: string[] | null = null;
  const close = (): void => {
    if (paragraph.length) blocks.push({ kind: 'paragraph', spans: parseSpans(paragraph.join(' ')) });
    paragraph = [];
  };
  for (const line of text.split('\n')) {
    if (line.startsWith('```')) {
      if (code === null) {
        close();
        code = [];
      } else {
        blocks.push({ kind: 'formula', text: code.join('\n') });
        code = null;
      }
    } else if (code !== null) {
      code.push(line);
    } else if (line.startsWith('#')) {
      close();
      blocks.push({ kind: 'heading', spans: [{ text: line.replace(/^#+\s*/, '') }] });
    } else if (line.startsWith('- ')) {
      close();
      const item = parseSpans(line.slice(2));
      const last = blocks.at(-1);
      if (last?.kind === 'list') last.items.push(item);
      else blocks.push({ kind: 'list', items: [item] });
    } else if (line.startsWith('  ') && blocks.at(-1)?.kind === 'list' && line.trim()) {
      (blocks.at(-1) as { items: Span[][] }).items.at(-1)!.push(...parseSpans(` ${line.trim()}`));
    } else if (line.trim() === '') {
      close();
    } else {
      paragraph.push(line.trim());
    }
  }
  close();
  return blocks;
}
