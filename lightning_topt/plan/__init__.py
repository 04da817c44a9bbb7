"""Plans: searched, chosen, written, explained and shown.

plan_search                                 `search_plans(SearchRequest(...))` -> `PlanFrontier`
    chains                                  chains of blocks on a mesh, and bounds of them
    pipeline_search, staged_plans           plans with stages
    stage_blocks, stage_tables,             what blocks and stages cost: a chain, all ways to
    stage_simulation                        cut it, exactly for one cut
plan_frontier                               the plans that no other beats; `frontier.json`; steps of
                                            several micro-batches; how sure their costs are
choose                                      one plan of a frontier, and why
parallel_plan, plan_values                  `ParallelPlan`; `plan.yaml`
explanation                                 what a given plan costs, and where
step_factors                                how many steps a loss needs
scenarios                                   several clusters, batches and prices
frontier_report                             tables, and one page, for people
"""
