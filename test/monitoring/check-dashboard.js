// Checks a dashboard of Grafana against the types of @grafana/schema:
//	node check-dashboard.js DASHBOARD FOLDER		FOLDER: where to install the types
const { execFileSync, spawnSync } = require('child_process');
const fs = require('fs');
const path = require('path');

const [file, folder] = process.argv.slice(2);
const dashboard = JSON.parse(fs.readFileSync(file, 'utf8'));
fs.mkdirSync(folder, { recursive: true });
execFileSync('npm', ['install', '--no-audit', '--no-fund', '--ignore-scripts', '--silent',
	'--prefix', folder, '@grafana/schema', 'typescript'], { stdio: 'inherit' });

const panelTypes = path.join(folder, 'node_modules/@grafana/schema/dist/types/raw/composable');
const typesOf = (type) => {
	const found = fs.readdirSync(path.join(panelTypes, type, 'panelcfg/x')).find((name) => name.endsWith('.d.ts'));
	return `./node_modules/@grafana/schema/dist/types/raw/composable/${type}/panelcfg/x/${found.replace(/\.d\.ts$/, '')}`;
};
const types = [...new Set(dashboard.panels.map((panel) => panel.type))];
const lines = [
	`import type { Dashboard } from '@grafana/schema';`,
	...types.map((type) => `import type * as ${type} from '${typesOf(type)}';`),
	// Enums as the strings that JSON has
	'type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;',
	`export const dashboard: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};`,
];
dashboard.panels.forEach((panel, i) => {
	lines.push(`export const options${i}: Json<Partial<${panel.type}.Options>> = ${JSON.stringify(panel.options, null, 1)};`);
	if (panel.fieldConfig.defaults.custom)
		lines.push(`export const custom${i}: Json<Partial<${panel.type}.FieldConfig>> = ${JSON.stringify(panel.fieldConfig.defaults.custom, null, 1)};`);
});
fs.writeFileSync(path.join(folder, 'dashboard.ts'), lines.join('\n') + '\n');
const check = spawnSync('node', [path.join(folder, 'node_modules/typescript/bin/tsc'), '--noEmit', '--skipLibCheck', '--strict',
	'--module', 'esnext', '--moduleResolution', 'bundler', 'dashboard.ts'], { cwd: folder, stdio: 'inherit' });
process.exit(check.status ?? 1);
