"""An OpenAI-compatible server over the stepping engine."""
