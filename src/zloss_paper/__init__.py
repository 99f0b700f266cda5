"""Recipes: one module per table or figure of the paper, with its settings and its numbers.

    engine            recipes, claims, tables, the paper's tables as data, caches of audits and runs
    show              a reproduction on the terminal and as a page
    heads, implementations, training, moe, reporting
                      the recipes, a family per room
    data              the paper's tables, and the shapes of small models

Imports point to the engine: show and every family import it. The engine imports none of them, a family imports no other
family, and no family imports show. tests/paper/test_import_directions.py checks this.
"""
