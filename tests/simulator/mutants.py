#!/usr/bin/env python3
"""Defects that tests on the simulator have to find: each mutant removes one barrier, fence, wait,
arrival or count from a kernel, or moves it. `--check` makes sure that each still applies: its old
text is exactly once in its file. mutation.py runs them.

Not listed, since they change nothing observable:

    the barrier at the head of a work tile (portable, fp32, tf32): a block that takes several
        draws them by next_work, which has two
    the __syncwarp of DecodeReader::release: whole warps read stages, by ldmatrix
    that of DecodeStack::fold_rest: between a state's store and its fold the warps have met
    that of weigh_rows (fp32): the barriers around the values follow
    the waits for the kernels before of decode's producers, of its warps that multiply and of block 0
        of an exchange: the first two wait for the scheduler, which waits too, and an exchange does not
        let the next one begin
    the __syncwarp behind the producers' reading of an item (attend_sm90_pages.cuh): it stays in its
        place until the consumers have what the producers bring
    the __syncwarp behind arrive_expecting in decode: bytes may come before they are announced
    the third barrier of the digest: the thread that reads the sum is the one that sets it to zero
    the order of turns at the tensor cores: any order gives the same bits
"""

import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# family: decode, mla, portable, fp32, tf32, hopper, arrivals, exchange, merge, gradients, gradients_hopper or other. breaks: what goes wrong.
Mutant = collections.namedtuple("Mutant", "name file family breaks old new")

MUTANTS = [
    # ---- masks ---------------------------------------------------------------------------------
    Mutant("decode-chunks-unseen", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "One query sees all keys, whatever its chunk.",
           old="p_.mask.window == 0 &&\n"
               "                          p_.mask.chunk == 0 &&",
           new="p_.mask.window == 0 &&"),
    Mutant("prefix-left-out", "kernels/cuda/dispatch/backend.cu", "portable",
           "The prefix has no pass of its own.",
           old="      p.only_prefix = p.resume = true;\n"
               "      cuda::attend(p, gpu_, stream_of(stream));\n",
           new=""),
    Mutant("prefix-forgets-the-rest", "kernels/cuda/dispatch/backend.cu", "decode",
           "The pass of the prefix does not start from the state of the first one.",
           old="p.only_prefix = p.resume = true;",
           new="p.only_prefix = true;"),
    Mutant("prefix-gradients-left-out", "kernels/cuda/gradients/attend_gradients.cu", "gradients",
           "The keys of the prefix, and what rows get of them, have no gradients.",
           old="  attend_interval(rest, gpu, stream);\n",
           new=""),
    Mutant("hopper-images-one-sided", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "ALiBi takes no later key for seen, where images see some.",
           old="params_.sees_no_later_key(found.sequence)",
           new="params_.is_causal(found.sequence)"),
    # ---- decode --------------------------------------------------------------------------------
    Mutant("decode-scheduler-views-overwritten", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "A lane writes a next piece's views into the slot while others still "
           "read the last one's.",
           old="    __syncwarp();  // all have read the views, which a next piece in the "
               "slot would overwrite\n"
               "    if (index >= works_)",
           new="    if (index >= works_)"),
    Mutant("decode-scheduler-views-unwritten", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "Lanes read the first and the last row's view before those lanes have "
           "written them.",
           old="    __syncwarp();\n"
               "    view_ = tile_view(",
           new="    view_ = tile_view("),
    Mutant("decode-scheduler-slot-in-work", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "A piece is found into a slot whose last piece is still multiplied and "
           "stored.",
           old="      shared_.done[to.stage].wait(to.parity ^ 1);\n",
           new=""),
    Mutant("decode-scheduler-slot-parity", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "The scheduler waits for the end of a piece that it has not said yet: "
           "nothing moves.",
           old="shared_.done[to.stage].wait(to.parity ^ 1);",
           new="shared_.done[to.stage].wait(to.parity);"),
    Mutant("decode-places-in-load", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "Places of a segment overwrite those of the one four before it, which "
           "may be in load.",
           old="    shared_.loaded[ahead_.stage].wait(ahead_.parity ^ 1);\n",
           new=""),
    Mutant("decode-places-on-their-way", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "A segment is known before its entries of the block table have come.",
           old="    if (!Traits::kPlain && p_.pages) "
               "arch::expect_copies(shared_.known[ahead_.stage]);\n",
           new=""),
    Mutant("decode-places-of-other-lanes", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "A segment is known before all lanes have written, or announced, their "
           "keys' places.",
           old="    __syncwarp();\n"
               "    if (thread_ == 0) shared_.known[ahead_.stage].arrive();",
           new="    if (thread_ == 0) shared_.known[ahead_.stage].arrive();"),
    Mutant("decode-segment-said-late", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "The producers are told of a segment before it stands in the ring.",
           old="    if (thread_ == 0) shared_.segments[known_.stage] = segment;\n"
               "    if (!Traits::kPlain && p_.pages) "
               "arch::expect_copies(shared_.known[ahead_.stage]);\n"
               "    __syncwarp();\n"
               "    if (thread_ == 0) shared_.known[ahead_.stage].arrive();\n",
           new="    if (!Traits::kPlain && p_.pages) "
               "arch::expect_copies(shared_.known[ahead_.stage]);\n"
               "    __syncwarp();\n"
               "    if (thread_ == 0) shared_.known[ahead_.stage].arrive();\n"
               "    if (thread_ == 0) shared_.segments[known_.stage] = segment;\n"),
    Mutant("decode-level-said-late", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "The level of a segment is written after the segment was said: it may "
           "be multiplied by then.",
           old="      if (thread_ == 0) shared_.levels[known_.stage] = level_of(place, "
               "more);\n"
               "      publish(slot, index);\n",
           new="      const int published = known_.stage;\n"
               "      publish(slot, index);\n"
               "      if (thread_ == 0) shared_.levels[published] = level_of(place, more);\n"),
    Mutant("decode-queries-of-other-lanes", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "Queries are announced by a lane while others still write theirs.",
           old="    __syncwarp();\n"
               "    if (thread_ == 0) shared_.has_queries[slot].arrive();",
           new="    if (thread_ == 0) shared_.has_queries[slot].arrive();"),
    Mutant("decode-lengths-early", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "Lengths are read, and the splits taken are written, while the kernel "
           "before may still run.",
           old="    if (!plan_.known) arch::wait_for_kernels_before();\n",
           new=""),
    Mutant("decode-ticket-early", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "A piece is drawn before the kernel before, which sets the ticket to "
           "zero, has ended.",
           old="    if (p.batch.query_start != nullptr || plan.numbers.where_uneven || "
               "plan.ticket != nullptr)\n"
               "      arch::wait_for_kernels_before();\n",
           new=""),
    Mutant("decode-ticket-left", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "The counter is not zero again after the last draw, and the next kernel "
           "starts from there.",
           old="static_cast<unsigned>(works_ + blocks - 1)",
           new="static_cast<unsigned>(works_ + blocks)"),
    Mutant("decode-order-unset", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "Lanes ask whether the sequences are sorted before lane 0 has said that "
           "they are not.",
           old="    if (thread_ == 0) shared.order.size = 0;\n"
               "    __syncwarp();\n",
           new="    if (thread_ == 0) shared.order.size = 0;\n"),
    Mutant("decode-order-lengths-unwritten", "kernels/cuda/decode/decode_order.cuh", "decode",
           "Places are counted among lengths that other lanes have not written "
           "yet.",
           old="order.lengths[b] = lengths[b];\n"
               "  sync();\n",
           new="order.lengths[b] = lengths[b];\n"),
    Mutant("decode-order-unsorted", "kernels/cuda/decode/decode_order.cuh", "decode",
           "A lane looks a sequence up that another has not sorted in yet.",
           old="  if (thread == 0) order.size = size;\n"
               "  sync();\n",
           new="  if (thread == 0) order.size = size;\n"),
    Mutant("decode-ring-parity", "kernels/cuda/common/pipeline_state.cuh", "decode",
           "Stages of a ring keep their parity in the next round.",
           old="      stage = 0;\n"
               "      parity ^= 1;\n",
           new="      stage = 0;\n"),
    Mutant("decode-free-count", "kernels/cuda/decode/decode_shared.cuh", "decode",
           "A stage is free as soon as one of four warps has read it.",
           old="free[threadIdx.x].init(Traits::kWarps);",
           new="free[threadIdx.x].init(1);"),
    Mutant("decode-done-count", "kernels/cuda/decode/decode_shared.cuh", "decode",
           "A piece's slot is free as soon as one of four warps has stored its "
           "columns.",
           old="done[threadIdx.x].init(Traits::kWarps);",
           new="done[threadIdx.x].init(1);"),
    Mutant("decode-loaded-count", "kernels/cuda/decode/decode_shared.cuh", "decode",
           "Places of keys are free as soon as one of the warps that load has used "
           "them.",
           old="loaded[threadIdx.x].init(Traits::kLoaders / 32);",
           new="loaded[threadIdx.x].init(1);"),
    Mutant("decode-stage-unawaited", "kernels/cuda/decode/decode_shared.cuh", "decode",
           "A stage is read before it is full.",
           old="    shared_.full[at_.stage].wait(at_.parity);\n",
           new=""),
    Mutant("decode-copies-unannounced", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "A stage is full while copies into it are on their way.",
           old="    arch::expect_copies(full);\n"
               "    sync_loaders",
           new="    sync_loaders"),
    Mutant("decode-phase-closed-early", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "A stage's phase may be complete before other warps have announced "
           "their copies.",
           old="    sync_loaders<Traits>();  // the phase is open until all copies are "
               "announced\n",
           new=""),
    Mutant("decode-loaded-before-values", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "Places are given back before the segment's values were loaded from "
           "there.",
           old="      queue(false);\n"
               "      __syncwarp();\n"
               "      if (thread_ % 32 == 0) shared_.loaded[ahead.stage].arrive();\n",
           new="      __syncwarp();\n"
               "      if (thread_ % 32 == 0) shared_.loaded[ahead.stage].arrive();\n"
               "      queue(false);\n"),
    Mutant("decode-stage-overwritten", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "Stages are filled again while the warps that multiply read them.",
           old="void wait_free() { shared_.free[at_.stage].wait(at_.parity ^ 1); }",
           new="void wait_free() {}"),
    Mutant("decode-free-parity", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "The producers wait for a round that was not filled yet: nothing moves.",
           old="void wait_free() { shared_.free[at_.stage].wait(at_.parity ^ 1); }",
           new="void wait_free() { shared_.free[at_.stage].wait(at_.parity); }"),
    Mutant("decode-box-overwrites", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "Only TMA does not wait for its stage to be free.",
           old="      wait_free();\n"
               "      if (thread_ == 0) full.arrive_expecting",
           new="      if (thread_ == 0) full.arrive_expecting"),
    Mutant("decode-box-bytes", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "A stage is full with half of its bytes.",
           old="full.arrive_expecting(Traits::kStageBytes);",
           new="full.arrive_expecting(Traits::kStageBytes / 2);"),
    Mutant("decode-new-keys-unfenced", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "TMA reads new keys that are not published to it.",
           old="  arch::publish_to_tma();\n",
           new=""),
    Mutant("decode-new-keys-of-other-lanes", "kernels/cuda/decode/decode_producer.cuh", "decode",
           "A lane copies new keys into a stage that other lanes have not written "
           "yet.",
           old="  arch::publish_to_tma();\n"
               "  sync_loaders<Traits>();\n",
           new="  arch::publish_to_tma();\n"),
    Mutant("decode-barriers-uninitialised", "kernels/cuda/decode/attend_decode.cuh", "decode",
           "Warps use barriers that other threads have not initialised yet.",
           old="  shared.init();\n"
               "  __syncthreads();\n",
           new="  shared.init();\n"),
    Mutant("decode-queries-unawaited", "kernels/cuda/decode/attend_decode.cuh", "decode",
           "The first segment of a piece is multiplied before its queries are "
           "there.",
           old="    if (first) shared.has_queries[piece].wait(pieces.parity);\n",
           new=""),
    Mutant("decode-tops-unmet", "kernels/cuda/decode/attend_decode.cuh", "decode",
           "Maxima of other warps are read before they are written.",
           old="  parts.put(parts.tops, own);\n"
               "  parts.meet();\n",
           new="  parts.put(parts.tops, own);\n"),
    Mutant("decode-weights-unmet", "kernels/cuda/decode/attend_decode.cuh", "decode",
           "Sums and weights of other warps are read before they are written.",
           old="  parts.put(parts.sums, own);\n"
               "  parts.meet();\n",
           new="  parts.put(parts.sums, own);\n"),
    Mutant("decode-done-before-stored", "kernels/cuda/decode/attend_decode.cuh", "decode",
           "A slot is given back while other lanes still read in it where their "
           "rows go.",
           old="    __syncwarp();\n"
               "    if (threadIdx.x % 32 == 0) shared.done[piece].arrive();",
           new="    if (threadIdx.x % 32 == 0) shared.done[piece].arrive();"),
    Mutant("decode-parts-barrier-count", "kernels/cuda/decode/decode_parts.cuh", "decode",
           "Two of the four warps open the barrier between parts and their "
           "readers.",
           old="arch::named_sync(1, Traits::kThreads);",
           new="arch::named_sync(1, Traits::kThreads / 2);"),
    Mutant("decode-parts-barrier-id", "kernels/cuda/decode/decode_parts.cuh", "decode",
           "The warps that multiply meet at the barrier of those that load.",
           old="arch::named_sync(1, Traits::kThreads);",
           new="arch::named_sync(2, Traits::kThreads);"),
    Mutant("decode-stack-overwritten", "kernels/cuda/decode/decode_stack.cuh", "decode",
           "Four lanes overwrite the scalars of a state in memory that other lanes "
           "may not have read.",
           old="    __syncwarp();\n"
               "    if (threadIdx.x % 32 >= 4) return;",
           new="    if (threadIdx.x % 32 >= 4) return;"),
    Mutant("decode-stack-place", "kernels/cuda/decode/decode_stack.cuh", "decode",
           "The states of two levels that wait in shared memory have one place.",
           old="near_ + i * kLevel",
           new="near_ + i / 2 * kLevel"),
    # ---- mla -----------------------------------------------------------------------------------
    Mutant("mla-products-unmet", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "Quarters of products are added before other warps have written theirs.",
           old="      meet();\n"
               "      weigh(",
           new="      weigh("),
    Mutant("mla-weights-unmet", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "Weights are multiplied before other warps have written theirs.",
           old="      meet();\n"
               "      if (tile > 0) rescale(state);\n",
           new="      if (tile > 0) rescale(state);\n"),
    Mutant("mla-tile-released-early", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "A tile is released before its values are multiplied.",
           old="      multiply_values(state);\n"
               "      __syncwarp();\n"
               "      if (lane_ < kBoxes) {\n"
               "        BoxState<Traits> own = at_;\n"
               "        own.advance(lane_);\n"
               "        shared_.free[own.stage].arrive();\n"
               "      }\n",
           new="      __syncwarp();\n"
               "      if (lane_ < kBoxes) {\n"
               "        BoxState<Traits> own = at_;\n"
               "        own.advance(lane_);\n"
               "        shared_.free[own.stage].arrive();\n"
               "      }\n"
               "      multiply_values(state);\n"),
    Mutant("mla-box-on-its-way", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "Keys are multiplied before their boxes have come.",
           old="      await(2 * quarter_ + i);\n",
           new=""),
    Mutant("mla-queries-early", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "Queries are read before they have come.",
           old="        shared_.has_queries[pieces.stage].wait(pieces.parity);\n",
           new=""),
    Mutant("mla-queries-given-early", "kernels/cuda/mla/mla_in_order.cuh", "mla",
           "The memory of queries that are still read is given to the next piece.",
           old="  __device__ __forceinline__ void hold_queries() {\n"
               "#pragma unroll\n"
               "    for (int i = 0; i < kQuarterSteps; ++i) {\n"
               "      const int step = quarter_ * kQuarterSteps + i;\n"
               "      arch::load_matrices(q_[i], arch::shared_address(shared_.queries[step / 4]) +\n"
               "                                     box_offset(lane_ % 16, step % 4 * 2 + lane_ / 16));\n"
               "    }\n"
               "    arrive(shared_.queries_free);\n",
           new="  __device__ __forceinline__ void hold_queries() {\n"
               "    arrive(shared_.queries_free);\n"
               "#pragma unroll\n"
               "    for (int i = 0; i < kQuarterSteps; ++i) {\n"
               "      const int step = quarter_ * kQuarterSteps + i;\n"
               "      arch::load_matrices(q_[i], arch::shared_address(shared_.queries[step / 4]) +\n"
               "                                     box_offset(lane_ % 16, step % 4 * 2 + lane_ / 16));\n"
               "    }\n"),
    Mutant("mla-keys-under-weights", "kernels/cuda/mla/mla_one_pass.cuh", "mla",
           "Weights are stored over keys that other warps' products still read.",
           old="    arch::named_sync(kGroupBarrier + kGroup, 128);\n",
           new=""),
    Mutant("mla-passed-weights-unfenced", "kernels/cuda/mla/mla_one_pass.cuh", "mla",
           "The other group's tensor cores read weights that are stored without a fence.",
           old="    sm90::fence_shared_stores();\n",
           new=""),
    Mutant("mla-other-weights-early", "kernels/cuda/mla/mla_one_pass.cuh", "mla",
           "A group multiplies the other's weights before they are there.",
           old="    shared_.ready[1 - kGroup].wait(round_);\n",
           new=""),
    Mutant("mla-half-released-early", "kernels/cuda/mla/mla_one_pass.cuh", "mla",
           "Half of a tile is released while products read it.",
           old="    begin_own_values();\n"
               "    sm90::wgmma_wait<0>();\n"
               "    end_values(0);\n",
           new="    begin_own_values();\n"
               "    end_values(0);\n"
               "    sm90::wgmma_wait<0>();\n"),
    Mutant("mla-sums-unmet", "kernels/cuda/mla/mla_one_pass.cuh", "mla",
           "A group adds the other's sums before they are written.",
           old="    arch::named_sync(kAllBarrier, Traits::kThreads);\n",
           new=""),
    Mutant("mla-box-in-use", "kernels/cuda/mla/mla_producer.cuh", "mla",
           "A box is loaded while the last one in its place is multiplied.",
           old="      wait_free();\n"
               "      arch::Barrier& full",
           new="      arch::Barrier& full"),
    Mutant("mla-copies-unfenced", "kernels/cuda/mla/mla_producer.cuh", "mla",
           "Tensor cores read keys that are copied without a fence.",
           old="    sm90::fence_shared_stores();\n",
           new=""),
    Mutant("mla-copies-unmet", "kernels/cuda/mla/mla_producer.cuh", "mla",
           "A tile is handed over before the other warps have copied their part.",
           old="    sm90::fence_shared_stores();\n"
               "    sync();\n",
           new="    sm90::fence_shared_stores();\n"),
    Mutant("mla-queries-on-their-way", "kernels/cuda/mla/mla_shared.cuh", "mla",
           "Queries are handed over before their copies have come.",
           old="    arch::wait_copies<0>();\n",
           new=""),
    Mutant("mla-queries-in-use", "kernels/cuda/decode/decode_scheduler.cuh", "mla",
           "A piece's queries are loaded over those that are still multiplied.",
           old="      shared_.queries_free.wait(queries_.parity ^ 1);\n",
           new=""),
    # ---- portable, fp32, tf32 ------------------------------------------------------------------
    Mutant("portable-piece-unwritten", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "Threads read the work tile before thread 0 has written it.",
           old="p_.scale(tile_.work.sequence, tile_.work.kv_head);\n"
               "    }\n"
               "    __syncthreads();\n",
           new="p_.scale(tile_.work.sequence, tile_.work.kv_head);\n"
               "    }\n"),
    Mutant("portable-rows-unwritten", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "Thread 0 reads the last row's view before another thread has written "
           "it.",
           old="    __syncthreads();\n"
               "    if (threadIdx.x == 0) {\n"
               "      tile_.view =",
           new="    if (threadIdx.x == 0) {\n"
               "      tile_.view ="),
    Mutant("portable-view-unwritten", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "Threads read the view and the first tile before thread 0 has written "
           "them.",
           old="tile_.template first_tile<kKeys>();\n"
               "    }\n"
               "    __syncthreads();\n",
           new="tile_.template first_tile<kKeys>();\n"
               "    }\n"),
    Mutant("portable-tile-on-its-way", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "A tile is multiplied before its copies have come.",
           old="    arch::wait_copies<0>();\n"
               "    __syncthreads();  // the tile",
           new="    __syncthreads();  // the tile"),
    Mutant("portable-tile-unmet", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "A tile is read before other threads' copies have come, and the last "
           "one overwritten early.",
           old="    __syncthreads();  // the tile (one stage: its K) is there, and "
               "what is loaded now is free\n",
           new=""),
    Mutant("portable-values-on-their-way", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "With one stage: values are multiplied while the newest group of copies "
           "is on its way.",
           old="      arch::wait_copies<0>();\n"
               "      __syncthreads();  // V is there",
           new="      arch::wait_copies<1>();\n"
               "      __syncthreads();  // V is there"),
    Mutant("portable-keys-overwritten", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "With one stage: the next keys overwrite those that other warps still "
           "multiply.",
           old="      __syncthreads();  // V is there, and nobody reads this K any more\n",
           new=""),
    Mutant("portable-stage", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "The next tile goes into the stage that is in work.",
           old="stages_ + (stage ^ 1) * 2 * Traits::kTileBytes",
           new="stages_ + stage * 2 * Traits::kTileBytes"),
    Mutant("portable-next-late", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "Thread 0 says the next tile behind the barrier after which all read "
           "it.",
           old="    if (threadIdx.x == 0) tile_.next[parity ^ 1] = tile_.template "
               "tile_after<kKeys>(key_tile);\n"
               "    arch::wait_copies<0>();\n"
               "    __syncthreads();  // the tile (one stage: its K) is there, and "
               "what is loaded now is free\n",
           new="    arch::wait_copies<0>();\n"
               "    __syncthreads();  // the tile (one stage: its K) is there, and "
               "what is loaded now is free\n"
               "    if (threadIdx.x == 0) tile_.next[parity ^ 1] = tile_.template "
               "tile_after<kKeys>(key_tile);\n"),
    Mutant("portable-columns-parity", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "A tile's columns overwrite the last tile's, which other warps may "
           "still add.",
           old="        columns_[parity * kKeys + threadIdx.x] =\n"
               "            key_column(p_, tile_.sequence, tile_.view, key_tile.first "
               "+ threadIdx.x);\n"
               "    }",
           new="        columns_[threadIdx.x] = columns_[kKeys + threadIdx.x] =\n"
               "            key_column(p_, tile_.sequence, tile_.view, key_tile.first "
               "+ threadIdx.x);\n"
               "    }"),
    Mutant("plain-tail-guard", "kernels/cuda/common/tile.cuh", "portable",
           "Keys behind the last that any row sees are read, and may lie outside "
           "of the cache.",
           old="const bool valid = at >= begin && at < end;",
           new="const bool valid = at >= begin && (at < end || chunk * 8 < dim);"),
    Mutant("next-work-slot-reused", "kernels/cuda/common/next_work_tile.cuh", "fp32",
           "Thread 0 draws the next piece while others still read the last one's "
           "number.",
           old="  __syncthreads();\n"
               "  if (threadIdx.x == 0) *slot =",
           new="  if (threadIdx.x == 0) *slot ="),
    Mutant("next-work-unwritten", "kernels/cuda/common/next_work_tile.cuh", "portable",
           "Threads read the number of the next piece before it is drawn.",
           old="  __syncthreads();\n"
               "  return *slot;",
           new="  return *slot;"),
    Mutant("fp32-views-unwritten", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "Threads read the first and the last row's view before they are "
           "written.",
           old="sequence, work);\n"
               "    __syncthreads();\n"
               "    const View view =",
           new="sequence, work);\n"
               "    const View view ="),
    Mutant("fp32-keys-overwrite", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of keys overwrites the slice that other warps still multiply.",
           old="        __syncthreads();  // every warp is done with the last slice\n"
               "        load_fp32<Traits, Traits::kSliceDims, kSegment>(",
           new="        load_fp32<Traits, Traits::kSliceDims, kSegment>("),
    Mutant("fp32-keys-on-their-way", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of keys is multiplied before its copies have come.",
           old="        arch::wait_copies<0>();\n"
               "        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_keys(",
           new="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_keys("),
    Mutant("fp32-keys-unmet", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of keys is multiplied before other threads' copies have come.",
           old="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_keys(",
           new="        if (busy) products.multiply_keys("),
    Mutant("fp32-slice-uncommitted", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice's copies belong to no group, and nobody waits for them.",
           old="    arch::copy_async(arch::shared_address(place), from, valid);\n"
               "  }\n"
               "  arch::commit_copies();\n",
           new="    arch::copy_async(arch::shared_address(place), from, valid);\n"
               "  }\n"),
    Mutant("fp32-values-overwrite", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of values overwrites the slice that other warps still "
           "multiply.",
           old="        __syncthreads();  // every warp is done with the last slice\n"
               "        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>(",
           new="        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>("),
    Mutant("fp32-values-on-their-way", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of values is multiplied before its copies have come.",
           old="        arch::wait_copies<0>();\n"
               "        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_values(",
           new="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_values("),
    Mutant("tf32-views-unwritten", "kernels/cuda/portable/segment_loop.cuh", "tf32",
           "Threads read the first and the last row's view before they are "
           "written.",
           old="sequence, work);\n"
               "    __syncthreads();\n"
               "    const View view =",
           new="sequence, work);\n"
               "    const View view ="),
    Mutant("tf32-keys-overwrite", "kernels/cuda/portable/segment_loop.cuh", "tf32",
           "A slice of keys overwrites the slice that other warps still multiply.",
           old="        __syncthreads();  // every warp is done with the last slice\n"
               "        load_fp32<Traits, Traits::kSliceDims, kSegment>(",
           new="        load_fp32<Traits, Traits::kSliceDims, kSegment>("),
    Mutant("tf32-keys-unmet", "kernels/cuda/portable/segment_loop.cuh", "tf32",
           "A slice of keys is multiplied before other threads' copies have come.",
           old="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_keys(",
           new="        if (busy) products.multiply_keys("),
    Mutant("tf32-values-overwrite", "kernels/cuda/portable/segment_loop.cuh", "tf32",
           "A slice of values overwrites the slice that other warps still "
           "multiply.",
           old="        __syncthreads();  // every warp is done with the last slice\n"
               "        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>(",
           new="        load_fp32<Traits, Traits::kValueDim, Traits::kSliceKeys>("),
    Mutant("tf32-values-on-their-way", "kernels/cuda/portable/segment_loop.cuh", "tf32",
           "A slice of values is multiplied before its copies have come.",
           old="        arch::wait_copies<0>();\n"
               "        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_values(",
           new="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_values("),
    Mutant("fp32-values-unmet", "kernels/cuda/portable/segment_loop.cuh", "fp32",
           "A slice of values is multiplied before other threads' copies have "
           "come.",
           old="        __syncthreads();  // the slice is there\n"
               "        if (busy) products.multiply_values(",
           new="        if (busy) products.multiply_values("),
    Mutant("resume-stats-overwritten", "kernels/cuda/common/store_state.cuh", "other",
           "One lane overwrites a row's statistics before the others have folded "
           "with them.",
           old="      __syncwarp(kMask << threadIdx.x % 32 / kLanes * kLanes);  // all have "
               "read what one writes\n",
           new="      (void)kMask;\n"),
    Mutant("resume-fold-stats-overwritten", "kernels/cuda/combine/resume.cu", "other",
           "One thread overwrites a row's statistics before the others have folded "
           "with them.",
           old="  __syncthreads();  // every thread of a row has read its stats\n",
           new=""),
    # ---- Hopper --------------------------------------------------------------------------------
    Mutant("hopper-barriers-uninitialised", "kernels/cuda/hopper/attend_sm90.cuh", "hopper",
           "Warpgroups use barriers before thread 0 has initialised them.",
           old="    __syncthreads();\n"
               "\n"
               "    // Known to be uniform",
           new="    // Known to be uniform"),
    Mutant("hopper-item-empty-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "An item is given back without the producer having read it, and later "
           "rounds begin early.",
           old="init(128 * T::kConsumers + producers + T::kTransposers)",
           new="init(128 * T::kConsumers + producers - 1 + T::kTransposers)"),
    Mutant("hopper-k-empty-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "A tile of keys is free as soon as one of the consumers is done with "
           "it.",
           old="shared.k_empty[i].init(kConsumerWarps);",
           new="shared.k_empty[i].init(4);"),
    Mutant("hopper-v-empty-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "A tile of values is free as soon as one of the consumers is done with "
           "it.",
           old="shared.v_empty[i].init(kConsumerWarps);",
           new="shared.v_empty[i].init(4);"),
    Mutant("hopper-q-empty-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "A consumer's queries are overwritten as soon as one of its four warps "
           "is done with them.",
           old="shared.q_empty[i].init(4);",
           new="shared.q_empty[i].init(1);"),
    Mutant("hopper-tile-bytes", "kernels/cuda/hopper/attend_sm90_producer.cuh", "hopper",
           "A tile is full with half of its bytes.",
           old="full.arrive_expecting(kTileBytes);",
           new="full.arrive_expecting(kTileBytes / 2);"),
    Mutant("hopper-tile-overwritten", "kernels/cuda/hopper/attend_sm90_producer.cuh", "hopper",
           "The producer fills tiles that consumers still multiply.",
           old="    empty.wait(state.parity ^ 1);\n",
           new=""),
    Mutant("hopper-keys-unawaited", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "Scores are begun before the tile of keys is there.",
           old="wait_keys() { shared.k_full[k.stage].wait(k.parity); }",
           new="wait_keys() {}"),
    Mutant("hopper-values-unawaited", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "Values are multiplied before their tile is there.",
           old="wait_values() { shared.v_full[v.stage].wait(v.parity); }",
           new="wait_values() {}"),
    Mutant("hopper-queries-parity", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "A consumer takes the last item's queries for the next one's.",
           old="      q_parity ^= 1;\n"
               "      wait_queries();\n",
           new="      wait_queries();\n"),
    Mutant("hopper-scores-pending", "kernels/cuda/hopper/attend_sm90_16bit.cuh", "hopper",
           "The softmax reads scores whose product may still run.",
           old="        wgmma_wait<1>();\n",
           new="        wgmma_wait<2>();\n"),
    Mutant("hopper-values-pending", "kernels/cuda/hopper/attend_sm90_16bit.cuh", "hopper",
           "Weights and values are given up while their product may still run.",
           old="        wgmma_wait<0>();\n"
               "        if (tile > 1) end_values();",
           new="        wgmma_wait<1>();\n"
               "        if (tile > 1) end_values();"),
    Mutant("hopper-values-uncommitted", "kernels/cuda/hopper/attend_sm90_16bit.cuh", "hopper",
           "The product of weights and values belongs to no group that is waited "
           "for.",
           old="    multiply_pv<T>(o, p, shared.v[v.stage]);\n"
               "    wgmma_commit();\n",
           new="    multiply_pv<T>(o, p, shared.v[v.stage]);\n"),
    Mutant("hopper-products-unfenced", "kernels/cuda/hopper/attend_sm90_16bit.cuh", "hopper",
           "O is rescaled in registers and then multiplied onto without a fence.",
           old="    wgmma_begin();\n"
               "    multiply_pv<T>",
           new="    multiply_pv<T>"),
    Mutant("hopper-item-given-back-early", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "A consumer gives an item back and then reads in it where its rows go.",
           old="#pragma unroll\n"
               "    for (int h = 0; h < 2; ++h) {\n"
               "      if (call.finished.out.data)\n"
               "        store_finished<T>(call, shared, stage, row + 8 * h, softmax, h, o);\n"
               "      else\n"
               "        store_state<T>(call, shared, stage, row + 8 * h, softmax, h, o);\n"
               "    }\n"
               "    shared.work_empty[stage].arrive();\n",
           new="    shared.work_empty[stage].arrive();\n"
               "#pragma unroll\n"
               "    for (int h = 0; h < 2; ++h) {\n"
               "      if (call.finished.out.data)\n"
               "        store_finished<T>(call, shared, stage, row + 8 * h, softmax, h, o);\n"
               "      else\n"
               "        store_state<T>(call, shared, stage, row + 8 * h, softmax, h, o);\n"
               "    }\n"),
    Mutant("hopper-query-bytes", "kernels/cuda/hopper/attend_sm90_producer.cuh", "hopper",
           "Queries are there with half of their bytes.",
           old="shared.q_full[c].arrive_expecting(kBytes);",
           new="shared.q_full[c].arrive_expecting(kBytes / 2);"),
    Mutant("arrivals-unawaited", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "Keys of other ranks are read before they have come.",
           old="    await_rank(call_.arrivals, rank, before_ + static_cast<unsigned>(count_));\n",
           new=""),
    Mutant("arrivals-of-the-first-heads", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "Heads that come later are read when the first ones have come.",
           old="      count_ = call_.arrivals.count_of(tile.head);\n",
           new="      count_ = call_.arrivals.count_of(0);\n"),
    Mutant("arrivals-own-rows-twice", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "arrivals",
           "Rows that see own keys alone are attended to twice, and others never.",
           old="    remainder -= call.own_slots * heads;\n",
           new=""),
    Mutant("arrivals-queries-unawaited", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "Queries of other ranks are read before they have come.",
           old="      await_queries(row, rows);\n",
           new=""),
    Mutant("arrivals-of-the-last-queries", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "Of a tile of queries those of its last row are waited for.",
           old="    await_from(portion, row);\n",
           new="    await_portion(*portion);\n"),
    Mutant("arrivals-rows-elsewhere", "kernels/row_places.hpp", "arrivals",
           "The first row of a stretch ends where the stretch before it does.",
           old="stretch[i + 1].begin <= row",
           new="stretch[i + 1].begin < row"),
    Mutant("arrivals-of-the-first-portion", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "What has come of the first rank stands for what has come of all.",
           old="static_cast<int>(arrived_ >> at & 15)",
           new="static_cast<int>(arrived_ & 15)"),
    Mutant("arrivals-own-too-far", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "A tile that begins among the keys of others is taken for one of own keys.",
           old="last.is_own() && last.begin <= seen",
           new="last.is_own()"),
    Mutant("arrivals-of-the-last-keys", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "A tile that reaches into several portions waits for the one of its last keys.",
           old="    await_from(arrivals.portion + portion_, seen);\n",
           new="    await_portion(arrivals.portion[portion_]);\n"),
    Mutant("arrivals-portion-kept", "kernels/cuda/hopper/attend_sm90_producer.cuh", "arrivals",
           "A work tile looks for its keys from where the one before it ended.",
           old="      portion_ = 0;\n",
           new=""),
    Mutant("arrivals-words-unawaited", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "arrivals",
           "What ranks say of the run is compared before it has come.",
           old="    if (call_.arrivals && call_.finished.headers.digests != nullptr) await_digests(call_.arrivals);\n",
           new=""),
    Mutant("arrivals-unpublished", "kernels/cuda/hopper/attend_sm90_block.cuh", "arrivals",
           "TMA reads keys whose arrival it has not been told of.",
           old="  cuda::arch::publish_to_tma();\n",
           new=""),
    Mutant("puts-past-the-rows", "kernels/cuda/exchange/copy_words.cuh", "puts",
           "A row behind the last one of a block is copied too.",
           old="    for (; row < c.rows; row += step) *to",
           new="    for (; row <= c.rows; row += step) *to"),
    Mutant("puts-part-of-the-piece", "kernels/cuda/exchange/put_rows.cu", "puts",
           "A piece has the part of its own number, where only every second or fourth has one.",
           old="std::int64_t{piece / block.every} * block.part_width",
           new="std::int64_t{piece} * block.part_width"),
    Mutant("puts-last-part-too-wide", "kernels/row_puts.hpp", "puts",
           "The last part is as wide as the others.",
           old="      return rest < part_width ? rest : part_width;\n",
           new="      return rest > 0 ? part_width : 0;\n"),
    Mutant("puts-signalled-by-the-first", "kernels/cuda/exchange/put_rows.cu", "beside",
           "The first warp that is done with a piece says that it is there.",
           old="!= warps_ - 1) return;",
           new="!= 0) return;"),
    Mutant("puts-run-uncounted", "kernels/cuda/exchange/put_rows.cu", "beside",
           "A run is not counted, so that what is here of it counts for the next one.",
           old="    if (lane_ == 0) arch::store_whole(&own_.runs, runs);\n",
           new=""),
    Mutant("puts-run-begun-late", "kernels/cuda/exchange/put_rows.cu", "beside",
           "The attention begins before it is told what was here ahead of the run.",
           old="    if (lane == 0) arch::store_whole(&own.before, runs * PutFlags::kRun);\n",
           new=""),
    Mutant("puts-opened-by-every-block", "kernels/cuda/exchange/put_rows.cu", "puts",
           "Every block tells the others that this rank has room.",
           old="__shfl_sync(0xffffffff, earlier, 0) == 0;",
           new="__shfl_sync(0xffffffff, earlier, 0) >= 0;"),
    Mutant("puts-before-there-is-room", "kernels/cuda/exchange/put_rows.cu", "meeting",
           "Rows are put where another rank still reads those of the run before.",
           old="await_count(own, own.free + lane, runs + 1)",
           new="await_count(own, own.free + lane, runs)"),
    Mutant("puts-not-here-at-the-end", "kernels/cuda/exchange/put_rows.cu", "meeting",
           "A kernel that nothing goes beside ends before all that others put is here.",
           old="    if (!puts_.beside && lane_ < puts_.among.ranks)",
           new="    if (false && lane_ < puts_.among.ranks)"),
    Mutant("puts-results-unawaited", "kernels/cuda/combine/pack_outputs.cu", "meeting",
           "Finished rows are copied before every rank has put its own.",
           old="  await_count(own, own.ended + rank, own.runs);\n",
           new=""),
    Mutant("hopper-queries-overwritten", "kernels/cuda/hopper/attend_sm90_producer.cuh", "hopper",
           "The next item's queries overwrite those that a consumer still "
           "multiplies.",
           old="    shared.q_empty[c].wait(parity ^ 1);\n",
           new=""),
    Mutant("hopper-cleared-unfenced", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "The tensor cores read values whose zeros are not published to them.",
           old="  fence_shared_stores();\n",
           new=""),
    Mutant("hopper-cleared-unmet", "kernels/cuda/hopper/attend_sm90_consumer.cuh", "hopper",
           "Values are multiplied before other threads have cleared theirs.",
           old="  named_sync(barrier, kThreads);\n",
           new=""),
    Mutant("hopper-ring-parity", "kernels/cuda/common/pipeline_state.cuh", "hopper",
           "Stages keep their parity in the next round.",
           old="      stage = 0;\n"
               "      parity ^= 1;\n",
           new="      stage = 0;\n"),
    Mutant("hopper-item-of-lane-0", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "Lanes read the item and the places of its keys before lane 0 has "
           "written them.",
           old="    b = __shfl_sync(0xffffffff, b, 0);\n"
               "    __syncwarp();\n",
           new="    b = __shfl_sync(0xffffffff, b, 0);\n"),
    Mutant("hopper-limits-of-other-lanes", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "Limits of the last row are read before another lane has written them.",
           old="    __syncwarp();\n"
               "    const int keys = rows > 0",
           new="    const int keys = rows > 0"),
    Mutant("hopper-empty-item-unwritten", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "Lanes write empty rows by a number of rows that lane 0 has not written "
           "yet.",
           old="    __syncwarp();\n"
               "    return {b,",
           new="    return {b,"),
    Mutant("hopper-empty-item-overwritten", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "The next item takes the place of an empty one that other lanes still "
           "read.",
           old="        __syncwarp();  // every lane has read the work tile before the next "
               "takes its place\n",
           new=""),
    Mutant("hopper-item-in-work", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "An item is announced into a place that consumers still read.",
           old="      shared_.work_empty[work_.stage].wait(work_.parity ^ 1);\n"
               "      WorkTile& tile",
           new="      WorkTile& tile"),
    Mutant("hopper-ticket-left", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "Items are counted on past the last, and a counter that is kept makes "
           "the next launch skip some.",
           old="atomicInc(call_.next, call_.work_tiles - 1)",
           new="atomicInc(call_.next, call_.work_tiles)"),
    Mutant("hopper-positions-overwritten", "kernels/cuda/hopper/attend_sm90_scores.cuh", "hopper",
           "Positions of a tile overwrite those that other warps still read.",
           old="  named_sync(barrier, 128);  // the tile before is through with its "
               "positions\n",
           new=""),
    Mutant("hopper-positions-unwritten", "kernels/cuda/hopper/attend_sm90_scores.cuh", "hopper",
           "Positions are read before other threads have written them.",
           old="runs.position(max(first + key, 0));\n  }\n  named_sync(barrier, 128);\n",
           new="runs.position(max(first + key, 0));\n  }\n"),
    Mutant("hopper-page-copies-unannounced", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "A tile out of pages is handed over while copies into it are on their "
           "way.",
           old="    expect_copies(landed);\n",
           new=""),
    Mutant("hopper-page-phase-closed-early", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "A tile's phase may be complete before other lanes have announced their "
           "copies.",
           old="    __syncwarp();  // the phase is open until all copies are announced\n",
           new=""),
    Mutant("hopper-page-unfenced", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "The tensor cores read copied tiles that are not published to them.",
           old="    fence_shared_stores();\n",
           new=""),
    Mutant("hopper-page-unawaited", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "A tile out of pages is handed over before it has landed.",
           old="    landed[stage_of(tile)].wait(parity_of(tile));\n",
           new=""),
    Mutant("hopper-page-keys-overwritten", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "Keys out of pages overwrite a tile that consumers still multiply.",
           old="        shared_.k_empty[stage].wait(parity_of(done_ + tile) ^ 1);\n",
           new=""),
    Mutant("hopper-page-values-parity", "kernels/cuda/hopper/attend_sm90_pages.cuh", "hopper",
           "Values out of pages wait for the consumers of a tile that is not "
           "loaded yet: nothing moves.",
           old="shared_.v_empty[stage].wait(parity_of(done_ + tile - 1) ^ 1);",
           new="shared_.v_empty[stage].wait(parity_of(done_ + tile - 1));"),
    Mutant("hopper-page-landed-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "A tile out of pages has landed with the copies of one of two warps.",
           old="shared.landed.k[i].init(kPageWarps);",
           new="shared.landed.k[i].init(1);"),
    Mutant("hopper-order-stage-in-work", "kernels/cuda/hopper/attend_sm90_segments.cuh", "hopper",
           "Lanes copy keys into a stage that one of them has not found empty yet.",
           old="    __syncwarp();  // the stage is empty\n",
           new=""),
    Mutant("hopper-order-copies-unawaited", "kernels/cuda/hopper/attend_sm90_segments.cuh", "hopper",
           "Segments are announced while their copies are on their way.",
           old="      wait_copies<0>();\n"
               "      fence_shared_stores();\n"
               "      __syncwarp();\n"
               "      if (lane_ == 0 && copies_k)",
           new="      fence_shared_stores();\n"
               "      __syncwarp();\n"
               "      if (lane_ == 0 && copies_k)"),
    Mutant("hopper-order-copies-of-other-lanes", "kernels/cuda/hopper/attend_sm90_segments.cuh",
           "hopper",
           "Segments are announced before the copies of other lanes have come.",
           old="      fence_shared_stores();\n"
               "      __syncwarp();\n"
               "      if (lane_ == 0 && copies_k)",
           new="      fence_shared_stores();\n"
               "      if (lane_ == 0 && copies_k)"),
    Mutant("hopper-order-copies-unfenced", "kernels/cuda/hopper/attend_sm90_segments.cuh", "hopper",
           "The tensor cores read copies that are not published to them.",
           old="      fence_shared_stores();\n"
               "      __syncwarp();\n"
               "      if (lane_ == 0 && copies_k)",
           new="      __syncwarp();\n"
               "      if (lane_ == 0 && copies_k)"),
    Mutant("hopper-order-segment-overwritten", "kernels/cuda/hopper/attend_sm90_fixed_order.cuh",
           "hopper",
           "A stage is given back before every lane has read what becomes of its "
           "segment.",
           old="    __syncwarp();  // every lane has read the segment\n",
           new=""),
    Mutant("hopper-order-values-pending", "kernels/cuda/hopper/attend_sm90_fixed_order.cuh", "hopper",
           "O folds while its product may still run.",
           old="    wgmma_wait<0>();\n"
               "    pin(product);\n",
           new="    wgmma_wait<1>();\n"
               "    pin(product);\n"),
    Mutant("hopper-order-far-overwritten", "kernels/cuda/hopper/attend_sm90_fixed_order.cuh", "hopper",
           "A state that waits far is overwritten by the next one.",
           old="      at_.add_far(1);\n",
           new=""),
    Mutant("hopper-order-near-for-held", "kernels/cuda/common/fold_plan.cuh", "hopper",
           "A state waits near although another one comes there before it goes.",
           old="    } else if (after > level) {",
           new="    } else if (after != level) {"),
    Mutant("hopper-fp8-unfenced", "kernels/cuda/hopper/attend_sm90_fp8.cuh", "hopper",
           "The tensor cores read transposed values that are not published to "
           "them.",
           old="      fence_shared_stores();\n",
           new=""),
    Mutant("hopper-fp8-stored-unawaited", "kernels/cuda/hopper/attend_sm90_fp8.cuh", "hopper",
           "Values are transposed before TMA has brought them.",
           old="      stored.full.wait(stored_parity);\n",
           new=""),
    Mutant("hopper-fp8-stored-parity", "kernels/cuda/hopper/attend_sm90_fp8.cuh", "hopper",
           "Every second tile of values is transposed without waiting for it.",
           old="      stored_parity ^= 1;\n",
           new=""),
    Mutant("hopper-fp8-values-overwritten", "kernels/cuda/hopper/attend_sm90_fp8.cuh", "hopper",
           "Transposed values overwrite those that consumers still multiply.",
           old="      shared.v_empty[at.stage].wait(at.parity ^ 1);\n",
           new=""),
    Mutant("hopper-fp8-sums-pending", "kernels/cuda/hopper/attend_sm90_fp8.cuh", "hopper",
           "O takes in sums whose product may still run.",
           old="    wgmma_wait<0>();\n"
               "    pin(sums);",
           new="    wgmma_wait<1>();\n"
               "    pin(sums);"),
    Mutant("hopper-fp8-full-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "Values are there when one of the two transposing warps is done.",
           old="T::kEightBits ? T::kTransposers / 32 : 1",
           new="1"),
    Mutant("hopper-fp8-stored-count", "kernels/cuda/hopper/attend_sm90_block.cuh", "hopper",
           "TMA overwrites values that the second transposing warp "
           "still reads.",
           old="shared.stored.empty.init(T::kTransposers / 32);",
           new="shared.stored.empty.init(1);"),
    # ---- the exchange --------------------------------------------------------------------------
    Mutant("exchange-departs-early", "kernels/cuda/exchange/exchange.cu", "exchange",
           "A block is counted out before all its threads have read the epoch.",
           old="  __syncthreads();\n"
               "  const Departure departure(p);\n"
               "  BoundedWait wait(p, r, turn.epoch, r.own + turn.copy);\n"
               "  for (",
           new="  const Departure departure(p);\n"
               "  BoundedWait wait(p, r, turn.epoch, r.own + turn.copy);\n"
               "  for ("),
    Mutant("exchange-rests-early", "kernels/cuda/exchange/exchange.cu", "exchange",
           "A row's statistics are put to rest before all of its threads have read "
           "them.",
           old="  __syncthreads();\n"
               "  clear_slots<kLevels>(r, turn, first, r.rows, row_step(), column);",
           new="  clear_slots<kLevels>(r, turn, first, r.rows, row_step(), column);"),
    Mutant("exchange-two-trips-rests-early", "kernels/cuda/exchange/exchange.cu", "exchange",
           "The same in two trips.",
           old="  __syncthreads();\n"
               "  clear_slots<kLevels>(r, turn, r.own_first",
           new="  clear_slots<kLevels>(r, turn, r.own_first"),
    Mutant("exchange-not-rested", "kernels/cuda/exchange/exchange.cu", "exchange",
           "Words of this exchange are taken for those of a later one in the same "
           "copy.",
           old="  clear_slots<kLevels>(r, turn, first, r.rows, row_step(), column);\n",
           new=""),
    Mutant("exchange-results-not-rested", "kernels/cuda/exchange/exchange.cu", "exchange",
           "Results of this exchange are taken for those of a later one in the "
           "same copy.",
           old="      clear_elements(results + (row * dim + column) * "
               "static_cast<unsigned>(size), size);\n",
           new=""),
    Mutant("exchange-lse-unawaited", "kernels/cuda/exchange/exchange.cu", "exchange",
           "A row's lse is stored before it has come.",
           old="(column != 0 || has_arrived(lse[step]))",
           new="true"),
    Mutant("exchange-sends-early", "kernels/cuda/exchange/exchange_words.cuh", "exchange",
           "States are sent before the kernel before has written them.",
           old="  arch::wait_for_kernels_before();\n",
           new=""),
    Mutant("exchange-part-arrived", "kernels/cuda/exchange/exchange_words.cuh", "exchange",
           "Sixteen bytes are taken as soon as the first four have come.",
           old="return min(min(four.x, four.y), min(four.z, four.w)) != 0;",
           new="return four.x != 0;"),
    Mutant("exchange-stats-unawaited", "kernels/cuda/exchange/exchange_words.cuh", "exchange",
           "Columns are folded before the row's statistics have come.",
           old="if (!has_arrived(stats[place]) || !has_arrived(o[place]))",
           new="if (!has_arrived(o[place]))"),
    Mutant("exchange-columns-unawaited", "kernels/cuda/exchange/exchange_words.cuh", "exchange",
           "A row is folded as soon as its statistics have come.",
           old="if (!has_arrived(stats[place]) || !has_arrived(o[place]))",
           new="if (!has_arrived(stats[place]))"),
    Mutant("exchange-send-tail", "kernels/cuda/exchange/exchange_words.cuh", "exchange",
           "Rows behind the last are sent too, over what follows in the peer's "
           "window.",
           old="if (row < end) arch::store_volatile(slot",
           new="arch::store_volatile(slot"),
    Mutant("exchange-header-half", "kernels/cuda/exchange/exchange_wait.cuh", "exchange",
           "A header is compared when half of it has come.",
           old="return header.y == epoch && header.w == epoch;",
           new="return header.y == epoch;"),
    Mutant("exchange-epoch-early", "kernels/cuda/exchange/exchange_turn.cuh", "exchange",
           "The first block that leaves makes the epoch this exchange's: others "
           "may read it after.",
           old="before_ + 1 != gridDim.x",
           new="before_ != 0"),
    Mutant("exchange-epoch-uncounted", "kernels/cuda/exchange/exchange_turn.cuh", "exchange",
           "Blocks that have read the epoch are not counted anew: the next "
           "exchange never advances it.",
           old="    arch::store_relaxed(p.peers.epoch + 1, 0);\n",
           new=""),
    Mutant("exchange-one-copy", "kernels/cuda/exchange/peer_buffer_layout.hpp", "exchange",
           "A peer's next words arrive where this rank has not put the last ones "
           "to rest.",
           old="kCopies = 3;",
           new="kCopies = 1;"),
    Mutant("exchange-parts-waiting-overwritten", "kernels/cuda/exchange/exchange_parts.cu", "exchange",
           "The next rows' states overwrite those that wait to be folded.",
           old="    __syncthreads();\n"
               "    state = fold_planes",
           new="    state = fold_planes"),
    Mutant("exchange-parts-own-unwritten", "kernels/cuda/exchange/exchange_parts.cu", "exchange",
           "A plane merges own states that plane 0 has not stored yet; and the "
           "block departs early.",
           old="  __syncthreads();  // the own states are seen, and every thread has its "
               "epoch\n",
           new=""),
    Mutant("exchange-parts-early", "kernels/cuda/exchange/exchange_parts.cu", "exchange",
           "Splits are folded before attention has ended and its writes are seen.",
           old="  arch::wait_for_kernels_before();\n",
           new=""),
    Mutant("exchange-parts-rests-early", "kernels/cuda/exchange/exchange_parts.cu", "exchange",
           "A row's statistics are put to rest before all of its threads have read "
           "them.",
           old="  __syncthreads();\n"
               "  clear_slots<kLevels>(r, turn, plane_first",
           new="  clear_slots<kLevels>(r, turn, plane_first"),
    # ---- merges and all else -------------------------------------------------------------------
    Mutant("merge-threads-unmet", "kernels/cuda/combine/fold_slots.cuh", "merge",
           "A thread folds with a neighbour's state before that is written.",
           old="    __syncthreads();\n"
               "    if (place == 0) {",
           new="    if (place == 0) {"),
    Mutant("merge-unwritten-splits", "kernels/cuda/combine/merge.cu", "merge",
           "Splits that attention did not take, and did not write, are folded too.",
           old="[&](int i) { return taken.hold(first + i); }",
           new="[](int) { return true; }"),
    Mutant("merge-two-lse-overwritten", "kernels/cuda/combine/merge_outputs.cu", "merge",
           "One thread overwrites a row's lse before the others have read it.",
           old="  if (writes_read_lse) __syncthreads();\n"
               "  if (!live) return;",
           new="  if (!live) return;"),
    Mutant("merge-parts-lse-overwritten", "kernels/cuda/combine/merge_outputs.cu", "merge",
           "The same for any number of parts.",
           old="  if (writes_read_lse) __syncthreads();\n"
               "  if (live && threadIdx.x == 0",
           new="  if (live && threadIdx.x == 0"),
    Mutant("merge-tree-group", "kernels/cuda/combine/fold_tree.cuh", "merge",
           "Groups fold with a half of their subtree that is not there yet.",
           old="if ((group >> kLevel & 1) == 0)",
           new="if ((group >> kLevel & 1) != 0)"),
    Mutant("segments-shared-reused", "kernels/cuda/combine/segments.cu", "other",
           "A block's sum overwrites its maximum before all threads have read "
           "that.",
           old="  __syncthreads();  // the last use of `shared` is over\n",
           new=""),
    Mutant("segments-shared-unwritten", "kernels/cuda/combine/segments.cu", "other",
           "A thread combines what other warps have not written yet.",
           old="  __syncthreads();\n"
               "  value = shared[0];",
           new="  value = shared[0];"),
    Mutant("segments-sums-unwritten", "kernels/cuda/combine/segments.cu", "other",
           "A group adds columns that other groups have not written yet.",
           old="    __syncthreads();\n"
               "    if (group == 0 && column < p.dim) {",
           new="    if (group == 0 && column < p.dim) {"),
    Mutant("gather-rows-unwritten", "kernels/cuda/cache/gather.cu", "other",
           "Keys are copied by rows that other threads have not found yet.",
           old="  __syncthreads();\n"
               "\n"
               "  const int chunks",
           new="  const int chunks"),
    Mutant("gather-tile-overwritten", "kernels/cuda/cache/gather.cu", "other",
           "The next head's keys are transposed over those that other threads "
           "still copy.",
           old="      __syncthreads();  // the last head's was read\n",
           new=""),
    Mutant("gather-tile-unwritten", "kernels/cuda/cache/gather.cu", "other",
           "Keys are copied out of a tile that other threads still transpose into.",
           old="      transpose(tile, rows, source, of_head, block, p.head_dim);\n"
               "      __syncthreads();\n",
           new="      transpose(tile, rows, source, of_head, block, p.head_dim);\n"),
    Mutant("gather-tail-guard", "kernels/cuda/cache/gather.cu", "other",
           "Keys behind the last that is wanted are copied, by rows that nobody "
           "found.",
           old="if (key >= block.begin && key < block.end) use",
           new="if (key >= block.begin && key < kKeys) use"),
    Mutant("gather-ticket-left", "kernels/cuda/cache/gather.cu", "other",
           "The ticket of the attention behind the copy is not set to zero.",
           old="    if (b == 0) *call.ticket = 0;\n",
           new=""),
    Mutant("rows-starts-unwritten", "kernels/cuda/cache/rows.cu", "other",
           "Starts of sequences are searched before other threads have written "
           "them.",
           old="    if (threadIdx.x == 0) starts[kThreads] = before + total;\n"
               "    __syncthreads();\n",
           new="    if (threadIdx.x == 0) starts[kThreads] = before + total;\n"),
    Mutant("copy-entries-unneeded", "kernels/copy_keys.hpp", "other",
           "Keys that no row sees are copied too, from where the block table says "
           "nothing.",
           old="  if (p.pages) keys = needed_keys(g, b);\n",
           new=""),
    Mutant("copy-past-the-room", "kernels/copy_keys.hpp", "other",
           "Keys go past the rows that there are.",
           old="to >= 0 && to < p.rows ? to : -1",
           new="to"),
    Mutant("copy-one-round", "kernels/cuda/cache/copy_keys.cu", "other",
           "A block takes the first of its keys over and over.",
           old="first + round * kKeys",
           new="first"),
    Mutant("move-entries-unchecked", "kernels/move_keys.hpp", "other",
           "Entries of a block table that are no page of the cache are followed.",
           old="    if (page < 0 || page >= pages.count) return {};\n",
           new=""),
    Mutant("move-one-key", "kernels/cuda/cache/move_keys.cu", "other",
           "All keys of a run go to the place of its first.",
           old="run.to_key + i",
           new="run.to_key"),
    Mutant("move-one-head", "kernels/cuda/cache/move_keys.cu", "other",
           "The words of the first head alone are moved.",
           old="w < p.kv_heads * words",
           new="w < words"),
    Mutant("digest-sum-unset", "kernels/cuda/cache/digest.cu", "other",
           "Threads add to a sum that thread 0 has not set to zero yet.",
           old="    if (threadIdx.x == 0) sum = 0;\n"
               "    __syncthreads();\n",
           new="    if (threadIdx.x == 0) sum = 0;\n"),
    Mutant("digest-sum-unfinished", "kernels/cuda/cache/digest.cu", "other",
           "Thread 0 takes the sum before all threads have added to it.",
           old="    __syncthreads();\n"
               "    if (threadIdx.x == 0) {\n"
               "      p.words[n]",
           new="    if (threadIdx.x == 0) {\n"
               "      p.words[n]"),
    Mutant("append-rows-of-others", "kernels/cuda/cache/append.cu", "other",
           "Rows that are not this rank's are written too, ahead of the cache.",
           old="  if (row.row < 0) return;\n",
           new=""),
    Mutant("rotate-across-halves", "kernels/cuda/cache/rotate.cuh", "other",
           "Eight partners are loaded at once where some are in the same half, or not aligned.",
           old="column + kCount <= rope.dim && rope.dim / 2 % kCount == 0;",
           new="column + kCount <= rope.dim;"),
    Mutant("rotate-rows-of-none", "kernels/cuda/cache/rotate_rows.cu", "other",
           "Rows past the last sequence are rotated too, by the length of no sequence.",
           old="  if (b < 0) return;\n",
           new=""),
    Mutant("claim-not-atomic", "kernels/cuda/cache/check_arrays.cu", "other",
           "Two threads claim a slot at once and both, or another claim, are lost.",
           old="return (atomicOr(claimed + slot / 32, bit) & bit) != 0;",
           new="const std::uint32_t before = claimed[slot / 32];\n"
               "    claimed[slot / 32] = before | bit;\n"
               "    return (before & bit) != 0;"),
    Mutant("splits-rest-forgotten", "kernels/cuda/common/view.cuh", "other",
           "Splits that have keys only because leaves differ by a segment are not "
           "taken.",
           old="(remainder < last ? remainder : last)",
           new="(remainder < last ? 0 : last)"),
    # ---- where query rows stand ----------------------------------------------------------------
    Mutant("position-by-local-row", "kernels/geometry.hpp", "other",
           "A row of a share stands where its number on the rank says.",
           old="queries.ranks == 1 ? token : sharded",
           new="queries.ranks > 0 ? token : sharded"),
    Mutant("position-by-local-length", "kernels/geometry.hpp", "other",
           "The rows of a share end at the last position of the sequence.",
           old="    if (queries.ranks == 1) return batch.query_len(b, tokens);\n",
           new="    if (queries.ranks > 0) return batch.query_len(b, tokens);\n"),
    Mutant("decode-one-row-is-the-last", "kernels/cuda/decode/decode_scheduler.cuh", "decode",
           "The one row of a share sees every key, as the one query of a sequence does.",
           old="sequence.kv_len - sequence.context_len == 1",
           new="p_.batch.query_len(sequence.index, p_.tokens) == 1"),
    Mutant("bias-by-local-row", "kernels/cuda/common/bias.cuh", "portable",
           "Biases of a share count from its own first row.",
           old="return {p.query_index(sequence, row.token), row.head, sequence};",
           new="return {row.token, row.head, sequence};"),
    Mutant("hopper-alibi-by-local-row", "kernels/cuda/hopper/attend_sm90_scheduler.cuh", "hopper",
           "Distances of ALiBi count from the share's own first row.",
           old="static_cast<int>(params_.query_index(found.sequence, tile.row))",
           new="tile.row"),

    # ---- values of another width ---------------------------------------------------------------
    Mutant("portable-values-of-head-dim", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "Columns of the values past the width of the keys are zeros.",
           old="load(p_.v, p_.value_dim, key_tile, to);",
           new="load(p_.v, p_.head_dim, key_tile, to);"),
    Mutant("portable-stores-head-dim", "kernels/cuda/portable/attend_portable.cuh", "portable",
           "As many columns of the state are stored as keys have.",
           old="if (n * 8 >= p.value_dim) break;",
           new="if (n * 8 >= p.head_dim) break;"),
    Mutant("portable-short-out-of-order", "kernels/cuda/dispatch/attend.cu", "portable",
           "Short queries whose keys are split fold outside of the fixed order.",
           old="p.invariant || !is_long;",
           new="p.invariant;"),
    Mutant("fp32-stores-head-dim", "kernels/cuda/portable/attend_fp32.cuh", "fp32",
           "As many columns of the state are stored as keys have.",
           old="if (d < to.columns) store(d,",
           new="if (d < padded_dim(p.head_dim)) store(d,"),
    Mutant("splits-fold-head-dim", "kernels/cuda/combine/merge.cu", "merge",
           "As many columns of the splits are folded as keys have.",
           old="const int vectors = padded_dim(p.value_dim) / kFoldVector;",
           new="const int vectors = padded_dim(p.head_dim) / kFoldVector;"),
    Mutant("resume-folds-head-dim", "kernels/cuda/combine/resume.cu", "merge",
           "As many columns of a state are folded onto the one before as keys have.",
           old="const int vectors = aside.columns() / kVector;",
           new="const int vectors = padded_dim(p.head_dim) / kVector;"),

    # ---- rows that end inside of eight elements ------------------------------------------------
    Mutant("row-read-past-its-end", "kernels/cuda/common/loader.cuh", "portable",
           "The elements after a row's last are taken for its own.",
           old="return i < count ?",
           new="return i < 8 ?"),
    Mutant("row-stored-past-its-end", "kernels/cuda/combine/row_epilogue.cuh", "merge",
           "A result's padding is stored too, over the head after it.",
           old="if (i < count) store_elements(",
           new="if (i < kColumns) store_elements("),

    # ---- gradients -----------------------------------------------------------------------------
    Mutant("gradients-work-overwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "Thread 0 finds the next work tile while others store the sums of the last one.",
           old="    __syncthreads();  // the last work tile is done with shared memory\n",
           new=""),
    Mutant("gradients-work-unwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "Threads read the work tile before thread 0 has found it.",
           old="    if (threadIdx.x == 0) find(index);\n"
               "    __syncthreads();\n",
           new="    if (threadIdx.x == 0) find(index);\n"),
    Mutant("gradients-owned-unwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "What may meet the owned rows or keys is found before all of them are.",
           old="    find_owned();\n"
               "    __syncthreads();\n",
           new="    find_owned();\n"),
    Mutant("gradients-part-unwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "Thread 0 starts the walk before another warp has found where it ends.",
           old="    find_part();\n"
               "    __syncthreads();\n",
           new="    find_part();\n"),
    Mutant("gradients-tiles-unwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "The rows or keys of the first tiles are found before thread 0 has said which these are.",
           old="    if (threadIdx.x == 0) start_walk();\n"
               "    __syncthreads();\n",
           new="    if (threadIdx.x == 0) start_walk();\n"),
    Mutant("gradients-slots-unwritten", "kernels/cuda/gradients/loop.cuh", "gradients",
           "The first tile is loaded before other threads have found its rows or keys.",
           old="    find_slots(1);\n"
               "    __syncthreads();\n",
           new="    find_slots(1);\n"),
    Mutant("gradients-tile-unmet", "kernels/cuda/gradients/loop.cuh", "gradients",
           "A tile is read before other threads' copies have come, and the last one is overwritten.",
           old="      __syncthreads();  // this tile and the slots of the next are there; the last tile is done\n",
           new=""),
    Mutant("gradients-tile-on-its-way", "kernels/cuda/gradients/loop.cuh", "gradients",
           "A tile is multiplied before its copies have come.",
           old="      products_.wait();\n"
               "      __syncthreads();",
           new="      __syncthreads();"),
    Mutant("gradients-owned-on-their-way", "kernels/cuda/gradients/loop.cuh", "gradients",
           "A block whose owned keys nobody sees ends while they are loaded.",
           old="    products_.wait();\n"
               "    stack.fold_all",
           new="    stack.fold_all"),
    Mutant("gradients-tiles-ahead", "kernels/cuda/gradients/loop.cuh", "gradients",
           "Thread 0 writes a tile three ahead over the one that others multiply.",
           old="kTiles = 4,",
           new="kTiles = 3,"),
    Mutant("gradients-slots-ahead", "kernels/cuda/gradients/loop.cuh", "gradients",
           "Rows or keys of a tile two ahead are written over those that others weigh.",
           old="kSlots = 3;",
           new="kSlots = 2;"),
    Mutant("gradients-stage", "kernels/cuda/gradients/mma_16bit.cuh", "gradients",
           "The next tile is loaded over the one that is multiplied.",
           old="static_cast<std::uint32_t>(number % 2)",
           new="static_cast<std::uint32_t>(number % 1)"),
    Mutant("gradients-fold-early", "kernels/cuda/gradients/loop.cuh", "gradients",
           "The sum of a virtual rank ends with each of its tiles.",
           old="next.leaf != own.leaf)",
           new="next.leaf >= own.leaf)"),
    Mutant("gradients-slice-overwritten", "kernels/cuda/gradients/fp32.cuh", "gradients",
           "A slice of operands is loaded while others multiply the last one.",
           old="    __syncthreads();  // every thread is done with the last slice\n",
           new=""),
    Mutant("gradients-slice-unmet", "kernels/cuda/gradients/fp32.cuh", "gradients",
           "A slice of operands is multiplied before others have loaded their part.",
           old="    __syncthreads();  // the slice is there\n"
               "#pragma unroll 2",
           new="#pragma unroll 2"),
    Mutant("gradients-weights-unmet", "kernels/cuda/gradients/fp32.cuh", "gradients",
           "Weights are read before others have written them, and the last slice is overwritten.",
           old="      __syncthreads();  // W is there, and every thread is done with the last slice\n",
           new=""),
    Mutant("gradients-rows-unmet", "kernels/cuda/gradients/fp32.cuh", "gradients",
           "A slice of rows is weighed before others have loaded their part.",
           old="      __syncthreads();  // the slice is there\n"
               "#pragma unroll 4",
           new="#pragma unroll 4"),
    Mutant("gradients-hopper-keys-freed", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "A stage of keys is free while dq is still multiplied with it.",
           old="      wgmma_wait<0>();\n      end_sums();\n      take();\n",
           new="      end_sums();\n      wgmma_wait<0>();\n      take();\n"),
    Mutant("gradients-hopper-values-early", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "dP is read, and its values are free, before it is there.",
           old="      wgmma_wait<1>();\n      pin(g);\n", new="      pin(g);\n"),
    Mutant("gradients-hopper-scores-early", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "S is read before it is there.",
           old="      begin_sums();\n      draw();\n      wgmma_wait<2>();\n",
           new="      begin_sums();\n      draw();\n"),
    Mutant("gradients-hopper-late-values-freed", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "Keys are overwritten while dq of a wide head is multiplied.",
           old="      wgmma_wait<1>();\n      end_sums();\n",
           new="      end_sums();\n      wgmma_wait<1>();\n"),
    Mutant("gradients-hopper-late-values-early", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "dP of a wide head is read before it is there.",
           old="      wgmma_wait<0>();\n      pin(g);\n      differentiate();\n",
           new="      pin(g);\n      differentiate();\n"),
    Mutant("gradients-hopper-clear-unfenced", "kernels/cuda/hopper/gradients_sm90_rows.cuh",
           "gradients_hopper", "Cleared keys are multiplied before the products know of the zeros.",
           old="      fence_shared_stores();\n      named_sync(kGroupBarrier + group_, 128);\n",
           new="      named_sync(kGroupBarrier + group_, 128);\n"),
    Mutant("gradients-hopper-bounds-unmet", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "Keys that some row sees are found before the bounds of the rows.",
           old="    __syncthreads();\n    if (threadIdx.x == 0) producer.find_seen();\n",
           new="    if (threadIdx.x == 0) producer.find_seen();\n"),
    Mutant("gradients-hopper-owned-on-their-way", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "The owned keys are multiplied before they have arrived.",
           old="      shared_.own_full.wait(0);\n", new=""),
    Mutant("gradients-hopper-rows-unfenced", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "Rows of nobody are multiplied before the products know of the zeros.",
           old="      fence_shared_stores();\n      named_sync(kGroupBarrier + group_, 128);\n",
           new="      named_sync(kGroupBarrier + group_, 128);\n"),
    Mutant("gradients-hopper-weights-overwritten", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "Scores replace the weights that dv is still multiplied with.",
           old="    wgmma_wait<1>();                            // S, and the sums of the tile before\n",
           new="    wgmma_wait<2>();\n"),
    Mutant("gradients-hopper-gradients-early", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "dP is read before it is there.",
           old="    wgmma_wait<1>();  // dP\n", new=""),
    Mutant("gradients-hopper-sums-early", "kernels/cuda/hopper/gradients_sm90_keys.cuh",
           "gradients_hopper", "dk and dv are stored while they are still multiplied.",
           old="      wgmma_wait<0>();\n      pin(dk);\n", new="      pin(dk);\n"),
    Mutant("gradients-wide-weights-unsaid", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "Weights are read before the other consumer has written them.",
           old="    shared_.weighed[thread_ / 32].wait(turn_);\n", new=""),
    Mutant("gradients-wide-weights-overwritten", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "Weights are written over those that the other consumer still reads.",
           old="    shared_.taken[thread_ / 32].wait(turn_ ^ 1);\n", new=""),
    Mutant("gradients-wide-weights-of-other-lanes",
           "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh", "gradients_hopper",
           "Weights are passed on before all lanes have written theirs.",
           old="    __syncwarp();\n    if (lane_ == 0) {\n      shared_.weighed",
           new="    if (lane_ == 0) {\n      shared_.weighed"),
    Mutant("gradients-wide-sums-freed", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "What sums are still multiplied with is free.",
           old="    wgmma_wait<kNewer>();\n    end_sums();\n", new="    end_sums();\n"),
    Mutant("gradients-wide-scores-early", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "Scores are read before they are there.",
           old="    wgmma_wait<kNewer>();\n    pin(s);\n", new="    pin(s);\n"),
    Mutant("gradients-wide-dout-early", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "dv is multiplied with dout that is on its way.",
           old="    if constexpr (kValues) shared_.dout_full[now_.stage].wait(now_.parity);\n", new=""),
    Mutant("gradients-wide-rows-unfenced", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "Rows of nobody are multiplied before the products know of the zeros.",
           old="      fence_shared_stores();\n      named_sync(kGroupBarrier, 128);\n    }\n"
               "    if (rows.marked)",
           new="      named_sync(kGroupBarrier, 128);\n    }\n"
               "    if (rows.marked)"),
    Mutant("gradients-wide-terms-overwritten", "kernels/cuda/hopper/gradients_sm90_wide_keys.cuh",
           "gradients_hopper", "Terms of rows are written over those of a tile that is not done.",
           old="      shared.rows_empty[slot].wait(parity);\n", new=""),
    Mutant("gradients-slopes-overwritten", "kernels/cuda/gradients/biases.cu", "gradients",
           "A sequence's parts of a slope are written over those of the last one.",
           old="    __syncthreads();  // the last sequence's parts are read\n",
           new=""),
    Mutant("gradients-slopes-unmet", "kernels/cuda/gradients/biases.cu", "gradients",
           "Parts of a slope are added before others have written them.",
           old="      __syncthreads();\n"
               "      if (thread < half)",
           new="      if (thread < half)"),
    Mutant("gradients-tokens-overwritten", "kernels/cuda/gradients/biases.cu", "gradients",
           "A thread finds the next sequence's rows while others ask for the last one's.",
           old="      __syncthreads();  // the last sequence's tokens are read\n",
           new=""),
    Mutant("gradients-tokens-unwritten", "kernels/cuda/gradients/biases.cu", "gradients",
           "Threads read which rows have entries of the matrix before they are found.",
           old="      if (threadIdx.x == 0) find_tokens(sequence);\n"
               "      __syncthreads();\n",
           new="      if (threadIdx.x == 0) find_tokens(sequence);\n"),
    Mutant("gradients-entries-overwritten", "kernels/cuda/gradients/biases.cu", "gradients",
           "Rows and keys of the next head are written while others weigh those of the last one.",
           old="        __syncthreads();  // the last head's slots are read\n",
           new=""),
    Mutant("gradients-entries-cleared", "kernels/cuda/gradients/biases.cu", "gradients",
           "A row of this rank is found before another thread says that the entry has none.",
           old="    __syncthreads();\n"
               "    const std::int64_t token",
           new="    const std::int64_t token"),
    Mutant("gradients-terms-overwritten", "kernels/cuda/gradients/row_terms.cu", "gradients",
           "A warp loads the next columns of rows whose last ones other threads still multiply.",
           old="    __syncthreads();  // the last tile has been read\n",
           new=""),
    Mutant("gradients-terms-unwritten", "kernels/cuda/gradients/row_terms.cu", "gradients",
           "A thread multiplies its row before the other warps have loaded it.",
           old="    __syncthreads();\n"
               "    if (first + thread < rows)",
           new="    if (first + thread < rows)"),
    Mutant("gradients-sinks-unmet", "kernels/cuda/gradients/row_terms.cu", "gradients",
           "Sums over rows are halved before the other half is there.",
           old="    __syncthreads();\n"
               "    if (thread < width)",
           new="    if (thread < width)"),
    Mutant("gradients-sinks-overwritten", "kernels/cuda/gradients/row_terms.cu", "gradients",
           "The sums of the next virtual rank are written before thread 0 has that of the last one.",
           old="  __syncthreads();             // the next sum may begin\n",
           new=""),
]


def apply(mutant, text):
    """The file's text with the mutant in it."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: its old text stands {count} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


def check():
    """The errors of the list."""
    wrong = []
    names = collections.Counter(mutant.name for mutant in MUTANTS)
    wrong += [f"{name}: {count} mutants of this name" for name, count in names.items() if count > 1]
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        try:
            if apply(mutant, text) == text:
                wrong.append(f"{mutant.name}: changes nothing")
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def main():
    if sys.argv[1:] != ["--check"]:
        sys.exit("usage: mutants.py --check")
    wrong = check()
    print("\n".join(wrong + [f"mutants: {len(MUTANTS)}, {len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
