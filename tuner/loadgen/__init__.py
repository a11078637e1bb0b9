"""Locust's side of the load: a process of its own, because gevent patches the interpreter."""
