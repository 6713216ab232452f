"""Parts of a simulator of a continuous-batching engine: requests to serve, and how many of their drafts hold."""
