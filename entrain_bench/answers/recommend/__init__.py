"""Which strategy to run for a job: strategies raced over seeds, the winner's plan, and how firm the answer is."""
