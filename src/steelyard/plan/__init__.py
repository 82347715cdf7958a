"""What a run costs and whether it can run, from shapes alone: parallel plans, FLOPs, matmuls,
memory, and sizes that are `auto`.
"""
