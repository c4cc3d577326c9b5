"""Text in, text out: lines, sentences, conversations, languages."""
