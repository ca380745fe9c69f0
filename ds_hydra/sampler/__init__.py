"""Planning from token lengths to one `IterationPlan`: pure decisions, and processes that make them
ahead of time.
"""
