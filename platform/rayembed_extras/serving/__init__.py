"""Model server with OpenAI's embeddings path: request batching, HTTP application, Ray Serve
deployment.
"""
