"""After a run: what its trained model predicts and writes, and how it is exported."""
