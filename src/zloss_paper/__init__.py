"""Recipes: the paper's tables and figures, each a table literal with its settings and its claims.

    engine            recipes, claims, tables, the workbench with its caches of audits and runs, reproductions
    heads, implementations, training, moe, reporting
                      the recipes, one package per family
    data              the paper's tables, our choices for what it leaves open, the items of its reporting
                      recommendations, and the shapes of small models

Imports point to the engine, which imports no family, and a family imports no other family.
tests/paper/test_import_directions.py checks this.
"""
