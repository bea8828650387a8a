"""What actions, transfers and memory cost: the truth the executors charge and the beliefs strategies plan with."""
