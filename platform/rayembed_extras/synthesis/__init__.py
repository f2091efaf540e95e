"""Write synthetic training pairs with a language model: prompts, requests, validation of
answers.
"""
