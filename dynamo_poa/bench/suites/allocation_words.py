"""What is said of the predicted splits beside their figures.

Owns: how the model came about, what a controller's reading is and is not, why single predictions are off.
Does not own: the figures (allocation_doc.py), what they are made from (allocation_inputs.py).
Invariant: a figure that a sentence has is computed, or marked as measured apart.
"""

from dynamo_poa.bench.suites.allocation import MIDDLE, Known

DEVELOPED = (
    "The model was made on ten of these workloads. The other six were held out: chosen when it was done. "
    "With them, in one change (a9cb6e3), came one thing more: that users think is part of the mix, without "
    "which `mixed | 96 users` could not be asked. It is an input to the model, whose formulas for what a "
    "split gives are those of then (`git diff a9cb6e3 -- dynamo_poa/games/allocation.py "
    "dynamo_poa/games/queues.py`). Its first version, a central queue "
    "and curves measured on prompts that share nothing, was right in 8 of the ten, as counted then; that "
    "version is gone and the count is not made again. What was added since is physics that the simulator's "
    "records showed, each for a term that was off: a prompt waits for the worker it was sent to, not for the "
    "first that is free; Dynamo's router takes a prompt off its books with its first token, so part of its "
    "choices are blind; what runs when a prompt arrives is more likely a long one; a request joins at the "
    "next iteration; contexts differ, and so does what is held."
)

AS_READ = (
    "*With the demand known* tests the model: the mix has the workload's own users and thought, and the "
    "length of the run. *As the controller reads it* tests what runs beside a graph: the controller's own "
    "code (`split.read_game`, `price_split`) on the minute three quarters into a run of two at "
    f"{MIDDLE.name} (of a trace, into its first half), its prompts and what was in flight second by second. "
    "That users wait for their answers it infers from a count in flight that is nearly constant; those who "
    "think it takes for an open loop; a pool over its capacity it judges by a minute. It names the nearest "
    f"split that gives up 1% at most by its own prediction, {MIDDLE.name} where that is one. Curves are the "
    "same. What it reads comes from the simulator's records, in which the count in flight of users who do "
    "not think is constant; a live one also varies by what is on its way. This reading of users was made "
    "after all 16 workloads had been seen: to it none is held out."
)


def explained(name: str, known: Known) -> str:
    """Return why a workload's prediction is off, where somebody looked; nothing elsewhere."""
    if name == "zipf | 240 requests/s":
        return (
            "The curve is a straight line and the engine's is not: the simulated engine counts a block that "
            "running requests share once, so that the more run the less each adds, and is concave in its "
            "blocks besides. A line measured at light load is too steep at a heavy one."
        )
    if name == "mixed | 96 users":
        short, long = known.minute.eighths_rps
        return (
            "A run ends with few users: those whose last sessions have many turns, and who think between "
            f"them. In a run as long as the suite's at {MIDDLE.name} {short[-1]:.3g} requests/s come in the "
            f"last eighth of its time and {min(short[1:-1]):.3g} to {max(short[1:-1]):.3g} in those between "
            f"the first and it; in a longer one {long[-1]:.3g}, and {min(long[1:-1]):.3g} to "
            f"{max(long[1:-1]):.3g}. The prediction is of the steady state."
        )
    return ""
