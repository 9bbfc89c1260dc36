// Safepoints inside a CUDA graph. See README.md.
//
// Every function returns a cudaError_t; 0 is success.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What the safepoints of a graph read and write. All pointers are device addresses; they are
// captured, so the memory must outlive the graph.
typedef struct {
  // Names the batch to abort; 0 names none. In pinned host memory, written by the host any time.
  const int32_t *flag;
  // Name of the batch that this replay computes, positive. Written before the replay.
  const int32_t *batch;
  // First layer that did not run, or -1. Written by the graph.
  int32_t *stopped_before;
} CoserveSafepoints;

// A body that is being captured.
typedef struct {
  cudaStream_t stream;
  cudaGraph_t graph;
} CoserveSafepointBody;

// Adds the start of a pass to a stream: nothing has stopped it yet.
int coserve_safepoints_begin_pass(cudaStream_t stream, const CoserveSafepoints *safepoints);

// Adds a safepoint to `stream`, which must be capturing, and an IF node behind it. Until
// coserve_safepoint_end_body, `body_stream` captures into the node's body: it holds the layers
// from `layer` up to the next safepoint. They run unless the pass was stopped here or before.
// `body_stream` must not be capturing. The same one may serve for all safepoints.
int coserve_safepoint_begin_body(cudaStream_t stream, cudaStream_t body_stream,
                                 const CoserveSafepoints *safepoints, int32_t layer,
                                 CoserveSafepointBody *body);

// Ends the body. What `stream` captures next follows the node.
int coserve_safepoint_end_body(const CoserveSafepointBody *body);

#ifdef __cplusplus
}
#endif
