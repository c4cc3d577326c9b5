"""An OpenAI-compatible server over the running engine: a request's text depends on the request alone."""
