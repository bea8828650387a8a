"""The recommended strategy for a job: a race over seeds, and the winner's plan judged at fresh seeds."""
