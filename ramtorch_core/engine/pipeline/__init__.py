"""Several devices, one process: every microbatch is driven through the stages by a thread of its own.

| file | holds |
| --- | --- |
| `given.py` | devices, schedules and weights as users give them |
| `stages.py`, `balance.py` | which module starts which stage, and the home of every parameter and buffer; even cuts |
| `running_order.py`, `timing.py` | in which order modules are called, and how long they take, which both may follow |
| `turnstile.py` | admits the ops of a schedule, one lane per device, in exactly its order; user code in one thread |
| `crew.py`, `thread_state.py` | threads that outlive the steps, and what a thread does not inherit |
| `microbatch.py`, `crossing.py`, `links.py` | one microbatch's state; the cut between two stages; copies |
| `kept.py` | what modules keep of a microbatch from one stage to the next |
| `frontier.py` | sees every torch call of user code and brings in what belongs to another stage |
| `trees.py` | containers of tensors |
| `compiled.py` | keeps the frontier out of compiled code |
| `loans.py` | weights used away from home, and weights cast once per step |
| `deferred.py` | the split backward: weight gradients as ops of their own |
| `dice.py` | random numbers that depend on step, microbatch and stage, not on timing |
| `step.py`, `executor.py` | one step: from microbatches to outputs and gradients |
| `split.py`, `runner.py`, `steps.py` | microbatches; a module with devices and schedules; gradients that wait |
"""
