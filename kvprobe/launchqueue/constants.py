"""The figures by which a launch queue is called full, with the measurement or the reason that each rests on.

What a reader needs to take its measurements stands beside it, as the ratios of a rule stand in the rule.

The live detector, auto, `kvprobe top`, the readers and the causes take them from here;
`native/trace/queues.c` repeats those that it needs (a test compares). Needs neither numpy nor the native library.
"""

from __future__ import annotations

__all__: list[str] = []

# -- what a call costs while slots are free --------------------------------------------------------------------------

SLOW_TIMES = 1.8  # times the baseline from which a call counts as slow: at 4 KiB a full queue makes it 2.4 (H200)
SLOW_AT_LEAST_NS = 500  # below this a clock's own reading is a good part of the figure
SLOW_AT_MOST_TIMES = 2.0  # times the calibrated baseline: a call this long is slow, whatever was learned since
BASELINE_DRIFT = 1.25  # how far a learned baseline may move from the calibrated one: above, blocked calls teach it
BASELINE_STEP = 0.05  # how far one run of fast calls moves it, so that an odd one does not
BASELINE_RUN = 16  # fast calls that a run must have to teach anything
SLOWER_TIMES = 2.5  # times the baseline, as the mean of a whole transfer: most of its calls waited
JUMP_TIMES = 3.0  # times the baseline, in an interval of which only sums are known: what noise hardly makes of a tenth

# -- how full a queue is ---------------------------------------------------------------------------------------------

SLACK = 32  # operations below the calibrated depth that still count as full: streams of a channel share some
FULL_SHARE = 0.9  # of the depth: as far as a count that was taken between completions can tell a full queue
ROOM_SHARE = 0.5  # of the depth: below it slots are free, by whatever count
LEAST_DEPTH = 16  # no known queue is full with fewer outstanding
REAL_DEPTH = 200  # the smallest queue of a real GPU takes 253 (CUDA_SCALE_LAUNCH_QUEUES=0.25x)
SHALLOW_SHARE = 0.9  # of the deepest in a recording: below it a call is taken to be unaffected by the queue
BELOW_SHARE = 0.8  # of the full depth: below it calls have a slot, where a count is reckoned
LATE_SHARE = 0.85  # of the deepest: a slow call entered there met a full queue whose freed slots were handed on late
REACHED_SHARE, OVER_TIMES = 0.75, 1.25  # of the full depth: how far a reckoned depth may be off
USUAL_DEPTHS = 900, 1_250  # that GPUs have where nothing scales them: 1,021 (H200), 1,022 (V100), 1,135 to 1,141 (H100)
COPY_DEPTHS = 1_000, 1_026  # that copies find a queue to take: V100 to H200
SCALED_ALREADY = 3_000  # a queue of one stream that is as deep has been scaled: 4x is the most
SCALED_DEPTH = 4_100  # submissions that the deepest queue known holds (CUDA_SCALE_LAUNCH_QUEUES=4x)
FLOOD_CALLS = 2_500  # submissions in a row that no queue of CUDA's own size holds: twice the deepest
CHANNEL_SLOTS, SHARED_SLOTS = 1_000, 21  # for copies, of each channel and of all together (H200)
MANY_STREAMS = 5  # in use at once, more than the four channels that CUDA makes by default: together they may fill one
OWN_SHARE, EARLY_TIMES = 0.7, 1.05  # of a channel's slots that one stream fills at most; the first copies may have run
BATCH_SLOTS = 0.041  # that one copy of a batch takes: a stream took 8,168 in batches of 8, 25,000 of 1,000 (H200)
BAND_SHARE, LEAST_BAND = 0.015, 4  # of the deepest: a queue frees slots in chunks (1,135 to 1,141 H100, 1,012 to 1,022)

# -- when slow calls at the top are more than chance -----------------------------------------------------------------

BLOCKED_SHARE = 0.10  # of a stream's calls in a window: loads of 64 small blocks that drain in between block 8 to 16
WINDOW_CALLS = 512  # the window: older calls count half
WINDOW_BLOCKED = 8  # blocked calls in it at least
ELSEWHERE_TIMES = 3  # slow calls for each fast one are this many times as many at the top as below it
DEARER_TIMES = 1.5  # what a window's calls at the top cost, as a mean, of what those below it do
DEARER_IN_FLOOD = 1.25  # of a flood: a full queue of 16 KiB copies makes calls of 2.0 µs 2.9 (H200, kvprobe in between)
DEARER_AT_PIN = 1.1  # of the quickest quarter of calls: 1.16 to 2.4 at full queues of 16 and 128 KiB copies (H100)
INSIDE_AT_PIN = 0.8  # of the time: 0.95 where a host submits 16 KiB in 2.5 µs and a full queue makes it 2.65 (H100)
STEADY_CALLS, STEADY_SHARE = 4, 0.25  # fewer calls suffice where they lose this share of the time at the top
OFTEN_CALLS, OFTEN_NS = 32, 200_000  # or this many, one in so much time: no scheduler takes a CPU away that often
STARVED_SHARE = 0.10  # of the time: a thread that waited so long for a CPU proves no full queue by its calls' pace
LEAST_BLOCKED = 5  # in a recording: fewer slow calls at the top are chance

LEAST_SEEN = 20  # calls to compare with
CHUNK_SHARE = 0.03  # of the calls at a full queue that wait at least: slots may be freed thirty at a time
STEP_TIMES = 5  # times as often as with a slot are calls slow where they are so by a full queue
TELLING_CHANCE, ALIGNED_MORE = 0.6, 0.2  # instants near an end of an operation: where more are, returning with one
DRAINED_SHARE = 0.8  # tells nothing, and an operation must end in so many blocked calls; else so many more must return
IN_GRAPHS = 0.5  # of the blocked calls with a graph outstanding: more, and their depth is no count
LEAST_DELAYS, GATHERED = 16, 0.5  # late returns; how much they gather at one delay (0 by chance, 1 for one value)
PACE_SPREAD = 0.5  # of the time that more calls than a queue holds take: a queue takes up what a thread gains or loses
SAME_DEPTH = 0.2  # how far the middle half of the depths at which slow calls begin may differ, of their median
ONSET_SHARE, ONSET_FREE, ONSET_LEAST = 0.15, 0.5, 20  # how far a depth reckoned there may be off: of the full one; of
ONSETS_FREED = 0.5  # the slots that were free before, or so many; and of the full depth, what one onset must have freed
FILLED_SHARE = 0.5  # of the time that calls a little dearer than quick ones take: less, and the host is what is slow
FULL_TRANSFERS = 2  # of an engine's newest: one may be slow by chance

# -- what else a slow call can be ------------------------------------------------------------------------------------

FENCE_NS = 2_000_000  # one call this long at a full queue: the stream itself waits for something (a forward pass)
STANDING_NS = 200_000  # nothing of a stream executed for so long within a blocked call: it stood behind a fence
PAUSE_NS = 50_000  # between two runs of one transfer: the program paused
ALIGNED_NS = 20_000  # a blocked call returns 2 to 10 µs after its stream moved on (V100, Kineto), to 18 (H100, nsys)
LIVE_LOST_SHARE = 0.2  # of the wall time that a stream's submissions lose, where only sums are known
LIVE_CALLS = 16  # calls in an interval below which its median says nothing
LIVE_BLOCKED = 64  # slow calls in an interval below which they may be kernels that are launched for the first time

# -- names of causes that auto gives as its reason, too ---------------------------------------------------------------

SATURATION = "launch_queue_saturation"
COSTLY_BATCH = "descriptor_bound_batch"
SMALL_COPIES = "small_copies"

# -- what is worth saying --------------------------------------------------------------------------------------------

NOTABLE_NS, NOTABLE_SHARE, LEAST_NS = 1_000_000, 0.01, 200_000  # a millisecond, or a hundredth of the time
# Of the window: a cause that costs so much is a warning, and what nobody explains is an open question.
WARNING_SHARE = 0.02
