import { mount } from 'svelte';

import App from './App.svelte';
import { speech } from './lib/i18n.svelte';
import { theme } from './lib/theme.svelte';
import './styles/tokens.css';
import './styles/base.css';
import './styles/page.css';
import './styles/diagrams.css';
import './styles/sections.css';
import './styles/narrow.css';

theme.start();
speech.start();
mount(App, { target: document.getElementById('app')! });
