"""What the tests share: problems with known answers, pools of ranks, runs, files that would do harm."""
