"""The recommended strategy for a job: a race over seeds, the winner's plan, and how robust the answer is."""
