// Products whose sums are used before they end: ptxas runs them one after the other and reports it
// in a note, on which the build has to fail.
__global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
  float sums[4] = {};
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, "
        "0;"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    sums[0] *= 2;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
}
