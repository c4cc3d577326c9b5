// The text of an answer, cut at its tokens.

const INCOMPLETE = "\uFFFD"; // what a token that is a part of a character decodes to

/**
 * Cuts a growing text into the parts that its tokens made.
 *
 * A token decoded alone may differ from what it adds to the text: parts of a character, a space that some tokenizers
 * drop before a first word, special tokens, and text that is held back because a stop string may begin there. So the
 * text is what is shown, and a part for which no single token can be found is that of all tokens in between.
 */
export class Cutter {
  #tokens = [];
  #text = "";

  /** The parts `{text, drafted}` that are certain once these tokens and this text were added. */
  add(tokens, text) {
    this.#tokens.push(...tokens);
    this.#text += text;
    const parts = [];
    while (this.#text && this.#tokens.length) {
      const count = this.#fits(this.#tokens[0]) ? 1 : this.#mixed();
      if (!count) break;
      parts.push(this.#take(count));
    }
    return parts.filter((part) => part.text);
  }

  /** The remaining parts, once the text is complete. */
  end() {
    if (!this.#text) return [];
    const drafted = this.#tokens.length > 0 && this.#tokens.every((token) => token.drafted);
    const part = { text: this.#text, drafted };
    this.#tokens = [];
    this.#text = "";
    return [part];
  }

  #fits(token) {
    if (!token.text || token.text.includes(INCOMPLETE)) return false;
    return this.#text.startsWith(token.text) || this.#text.startsWith(` ${token.text}`);
  }

  /** How many tokens go together before the next one whose text can be found; 0 while that is not known. */
  #mixed() {
    if (this.#tokens[0].text.startsWith(this.#text)) return 0; // the rest of its text is still held back
    for (let i = 1; i < this.#tokens.length; i++) {
      const { text } = this.#tokens[i];
      if (text && !text.includes(INCOMPLETE) && this.#text.includes(text)) return i;
    }
    return 0;
  }

  #take(count) {
    const taken = this.#tokens.splice(0, count);
    const [first] = taken;
    let length;
    if (count === 1 && this.#fits(first)) length = first.text.length + (this.#text.startsWith(first.text) ? 0 : 1);
    else length = this.#text.indexOf(this.#tokens[0].text);
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    return { text, drafted: taken.every((token) => token.drafted) };
  }
}
