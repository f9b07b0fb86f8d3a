"""The launch path: from a component's arguments to an AppDef, and what an AppDef's replicas run.

It stands outside `trn_dist.components` because torchx imports that package whole and takes every function in it for a
component.
"""
