import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

// Relative addresses, hashed names, no inline script: the server's content policy allows its own files only.
export default defineConfig({
  base: './',
  plugins: [svelte()],
  build: {
    outDir: '../src/hotloop/lab/static',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    reportCompressedSize: false,
  },
  test: { include: ['src/**/*.test.ts'], environment: 'node' },
});
