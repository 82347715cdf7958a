"""Engines `http`, `transformers-serve` and others that send requests to a server of OpenAI's
interface: the client, the servers that are started here, and the mock server that the client is
measured with.
"""
