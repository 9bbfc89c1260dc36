// Replays graphs with safepoints; prints what it measured as JSON. Exit status: 0 all is well,
// 1 a check failed, 77 there is no CUDA device.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "conditional_node.h"

namespace {

constexpr int kGroups = 8;
constexpr int kReplays = 200;
constexpr int kNoDevice = 77;
constexpr auto kTimeout = std::chrono::seconds(30);

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
      std::exit(1);                                                            \
    }                                                                          \
  } while (0)

void check_cuda(int error, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s\n", __FILE__, line,
               cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}
#define CUDA(call) check_cuda((call), __LINE__)

// Words in pinned memory that both sides see.
struct Shared {
  volatile int32_t flag;
  volatile int32_t batch;
  volatile int32_t began;  // The last group that began.
  volatile int32_t hold;   // This group lasts until `hold` changes; -1: none.
};

__global__ void group(Shared *shared, int32_t *runs, int32_t number, long long cycles) {
  shared->began = number;
  __threadfence_system();
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
  while (shared->hold == number) {
  }
  ++runs[number];
}

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

class Pass {
 public:
  Pass() {
    CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&body_stream_, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc(reinterpret_cast<void **>(&shared_), sizeof(Shared), cudaHostAllocMapped));
    CUDA(cudaHostGetDevicePointer(reinterpret_cast<void **>(&device_shared_), shared_, 0));
    CUDA(cudaMalloc(&runs_, kGroups * sizeof(int32_t)));
    CUDA(cudaMalloc(&stopped_before_, sizeof(int32_t)));
    safepoints_.flag = const_cast<const int32_t *>(&device_shared_->flag);
    safepoints_.batch = const_cast<const int32_t *>(&device_shared_->batch);
    safepoints_.stopped_before = stopped_before_;
    reset();
  }

  void reset() {
    shared_->flag = 0;
    shared_->began = -1;
    shared_->hold = -1;
    CUDA(cudaMemset(runs_, 0, kGroups * sizeof(int32_t)));
    CUDA(cudaDeviceSynchronize());
  }

  cudaGraphExec_t capture(bool with_safepoints, long long cycles) {
    CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    CUDA(coserve_safepoints_begin_pass(stream_, &safepoints_));
    for (int number = 0; number < kGroups; ++number) {
      if (!with_safepoints) {
        group<<<1, 1, 0, stream_>>>(device_shared_, runs_, number, cycles);
        continue;
      }
      CoserveSafepointBody body;
      CUDA(coserve_safepoint_begin_body(stream_, body_stream_, &safepoints_, number, &body));
      group<<<1, 1, 0, body_stream_>>>(device_shared_, runs_, number, cycles);
      CUDA(coserve_safepoint_end_body(&body));
    }
    cudaGraph_t graph;
    CUDA(cudaStreamEndCapture(stream_, &graph));
    cudaGraphExec_t executable;
    CUDA(cudaGraphInstantiate(&executable, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return executable;
  }

  void launch(cudaGraphExec_t graph, int32_t batch) {
    shared_->batch = batch;
    CUDA(cudaGraphLaunch(graph, stream_));
  }

  void finish() { CUDA(cudaStreamSynchronize(stream_)); }

  // Checks that the groups before `stopped_before` ran `times` times, and no other did.
  void expect_stopped_before(int32_t stopped_before, int32_t times = 1) {
    int32_t runs[kGroups], seen;
    CUDA(cudaMemcpy(runs, runs_, sizeof runs, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(&seen, stopped_before_, sizeof seen, cudaMemcpyDeviceToHost));
    CHECK(seen == stopped_before);
    const int32_t end = stopped_before < 0 ? kGroups : stopped_before;
    for (int number = 0; number < kGroups; ++number) CHECK(runs[number] == (number < end ? times : 0));
  }

  Shared &shared() { return *shared_; }

 private:
  cudaStream_t stream_ = nullptr, body_stream_ = nullptr;
  Shared *shared_ = nullptr, *device_shared_ = nullptr;
  int32_t *runs_ = nullptr, *stopped_before_ = nullptr;
  CoserveSafepoints safepoints_ = {};
};

double us_per_replay(Pass &pass, cudaGraphExec_t graph) {
  pass.launch(graph, 1);
  pass.finish();
  const auto start = Clock::now();
  for (int replay = 0; replay < kReplays; ++replay) pass.launch(graph, 1);
  pass.finish();
  return us_since(start) / kReplays;
}

void check_decisions(Pass &pass, cudaGraphExec_t graph) {
  pass.launch(graph, 7);  // Nobody asks.
  pass.finish();
  pass.expect_stopped_before(-1);

  pass.reset();
  pass.shared().flag = 6;  // Another batch.
  pass.launch(graph, 7);
  pass.finish();
  pass.expect_stopped_before(-1);

  pass.reset();
  pass.shared().flag = 7;  // Before it begins.
  pass.launch(graph, 7);
  pass.finish();
  pass.expect_stopped_before(0);

  pass.reset();  // The next batch runs.
  pass.shared().flag = 7;
  pass.launch(graph, 8);
  pass.finish();
  pass.expect_stopped_before(-1);
}

// While each group runs in turn; returns the longest time from the flag to the end, in µs.
double check_every_group(Pass &pass, cudaGraphExec_t graph) {
  double longest_us = 0.0;
  for (int number = 0; number < kGroups; ++number) {
    pass.reset();
    pass.shared().hold = number;
    pass.launch(graph, 100 + number);
    const auto deadline = Clock::now() + kTimeout;
    while (pass.shared().began != number) CHECK(Clock::now() < deadline);
    pass.shared().flag = 100 + number;
    const auto start = Clock::now();
    pass.shared().hold = -1;
    pass.finish();
    longest_us = std::max(longest_us, us_since(start));
    pass.expect_stopped_before(number + 1 < kGroups ? number + 1 : -1);
  }
  return longest_us;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return kNoDevice;
  Pass pass;
  const long long cycles = 50'000;
  const cudaGraphExec_t plain = pass.capture(false, cycles), safe = pass.capture(true, cycles);
  check_decisions(pass, safe);
  const double flag_to_end_us = check_every_group(pass, safe);
  pass.reset();
  const double plain_us = us_per_replay(pass, plain), safe_us = us_per_replay(pass, safe);
  std::printf("{\"groups\": %d, \"plain_us\": %.2f, \"safepoints_us\": %.2f, "
              "\"per_safepoint_us\": %.3f, \"flag_to_end_us\": %.1f}\n",
              kGroups, plain_us, safe_us, (safe_us - plain_us) / kGroups, flag_to_end_us);
  return 0;
}
