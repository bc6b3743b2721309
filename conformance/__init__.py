"""Gradient conformance: is the gradient of a trainer that of the whole batch?"""
