"""5. ParallelPlan -> running ranks: one technique per file, put together by an engine."""
