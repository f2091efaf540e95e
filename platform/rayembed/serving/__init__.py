"""A model behind OpenAI's embeddings path: batches of requests, the HTTP application, Ray Serve."""
