// What is typed into the form, as values, and values as they would be typed: whatever is taken over from another run
// comes out as it was. Pure.

import { BADLY_BEHAVED, harmless } from "./format.js";

const PIECE = /(\s+)|\$'((?:[^'\\]|\\.)*)'|'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)|((?:(?!\$')[^\s"'\\])+)/gsy;
const SIGNS = { n: "\n", r: "\r", t: "\t" };
const NAME = /^[A-Za-z_][A-Za-z0-9_]*$/;

/** What somebody typed into a shell, as words; quotes keep together what belongs together. */
export function words(line) {
  const found = [];
  let word = null, at = 0;
  for (const [all, space, ansi, single, double, escaped, plain] of line.matchAll(PIECE)) {
    at += all.length;
    if (space === undefined) word = (word ?? "") + (plain ?? single ?? inAnsi(ansi) ?? inDouble(double) ?? (escaped === "\n" ? "" : escaped));
    else if (word !== null) { found.push(word); word = null; }
  }
  if (at < line.length) throw new Error(unclosed(line.slice(at)));
  return word === null ? found : [...found, word];
}

function unclosed(rest) {
  if (rest[0] === "\\") return "Command: nothing follows the \\ at its end. Write \\\\ for the sign itself.";
  const quote = rest.replace("$", "")[0], start = rest.length > 30 ? `${rest.slice(0, 30)}…` : rest;
  return `Command: the quote in  ${start}  is not closed. Close it, or write \\${quote} for the sign itself.`;
}

const inDouble = (text) => text?.replace(/\\(["\\$`\n])/g, (_, one) => (one === "\n" ? "" : one));

const inAnsi = (text) => text?.replace(/\\(?:u([0-9a-fA-F]{4})|(.))/gs, (all, code, sign) => {
  if (code) return String.fromCharCode(parseInt(code, 16));
  if (!(sign in SIGNS) && !"\\'\"".includes(sign)) throw new Error(`Command: ${all} is not known here. In $'…' write \\n, \\r, \\t, \\\\, \\' or \\u and four digits.`);
  return SIGNS[sign] ?? sign;
});

/** Words as a shell takes them: what cannot be seen, or turns text around, by its number. */
export function quoted(list) {
  return list.map((word) => {
    if (/^[\w@%+=:,./-]+$/.test(word)) return word;
    return harmless(word) === word ? `'${word.replaceAll("'", "'\\''")}'` : `$'${numbered(word.replace(/[\\']/g, "\\$&"))}'`;
  }).join(" ");
}

const numbered = (text) => text.replace(BADLY_BEHAVED, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** {name: value} of NAME=VALUE, one a line; with `quotes`, a value in "" is read as JSON has it. */
export function assignments(text, field, quotes) {
  return Object.fromEntries(text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const at = line.indexOf("="), value = line.slice(at + 1);
    if (at < 1 || !NAME.test(line.slice(0, at))) throw new Error(`${field}: "${line}" is not NAME=VALUE`);
    return [line.slice(0, at), quotes && value.startsWith('"') ? unquoted(value, field, line.slice(0, at)) : value];
  }));
}

function unquoted(value, field, name) {
  try {
    return JSON.parse(value);
  } catch {
    throw new Error(`${field}: the quotes of ${name} do not match. In quotes write \\" for a quote, \\\\ for a backslash and \\n for a new line.`);
  }
}

/** The line that `assignments` makes this of: in quotes only where it has to be. */
export function assigned(name, value) {
  const plain = value === value.trim() && !value.startsWith('"') && !value.includes("\n") && harmless(value) === value;
  return `${name}=${plain ? value : numbered(JSON.stringify(value))}`;
}
