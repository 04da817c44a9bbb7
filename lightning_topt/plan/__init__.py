"""Plans: searched, chosen, written, explained and shown.

plan_search                                 `search_plans(SearchRequest(...))` -> `PlanFrontier`
    chains, known_plans                     chains of blocks on a mesh, and bounds of them
    pipeline_search, staged_plans           plans with stages
    stage_blocks, stage_tables,             what blocks and stages cost: a chain, all ways to
    stage_simulation                        cut it, exactly for one cut
    own_batches                             pipelines whose ranks bring a batch each
plan_frontier                               the plans that no other beats; `frontier.json`
choose                                      one plan of a frontier, and why
parallel_plan, plan_values                  `ParallelPlan`; `plan.yaml`
explanation                                 what a given plan costs, and where
micro_batches                               a step of several micro-batches
scenarios                                   several clusters, batches and prices
frontier_report, plan_report, report_table  tables, and one page, for people
"""
