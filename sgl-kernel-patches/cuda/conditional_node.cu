// See conditional_node.h. Needs CUDA 12.4 and relocatable device code.
#include "conditional_node.h"

#include <cuda_runtime.h>

#if CUDART_VERSION < 12040
#error "conditional IF nodes need CUDA 12.4"
#endif

#define RETURN_IF_ERROR(call)                  \
  do {                                         \
    const cudaError_t error_ = (call);         \
    if (error_ != cudaSuccess) return error_;  \
  } while (0)

namespace {

constexpr int32_t kNotStopped = -1;

__global__ void begin_pass(int32_t *stopped_before) { *stopped_before = kNotStopped; }

// One thread. Once a pass is stopped, the safepoints behind do not read the flag any more: it
// may be lowered by then, and each look goes to host memory.
__global__ void decide(cudaGraphConditionalHandle body_runs, CoserveSafepoints safepoints,
                       int32_t layer) {
  int32_t stopped_before = *safepoints.stopped_before;
  if (stopped_before == kNotStopped) {
    const int32_t flag = *const_cast<const volatile int32_t *>(safepoints.flag);
    const int32_t batch = *const_cast<const volatile int32_t *>(safepoints.batch);
    if (flag == batch) *safepoints.stopped_before = stopped_before = layer;
  }
  cudaGraphSetConditional(body_runs, stopped_before == kNotStopped);
}

// The end of what a stream has captured.
struct Tail {
  cudaGraph_t graph;
  const cudaGraphNode_t *nodes;
  const cudaGraphEdgeData *edges;
  size_t count;
};

// CUDA 13 gave the functions that know of edges the plain names.
#if CUDART_VERSION >= 13000
#define STREAM_GET_CAPTURE_INFO cudaStreamGetCaptureInfo
#define GRAPH_ADD_NODE cudaGraphAddNode
#define STREAM_UPDATE_CAPTURE_DEPENDENCIES cudaStreamUpdateCaptureDependencies
#else
#define STREAM_GET_CAPTURE_INFO cudaStreamGetCaptureInfo_v3
#define GRAPH_ADD_NODE cudaGraphAddNode_v2
#define STREAM_UPDATE_CAPTURE_DEPENDENCIES cudaStreamUpdateCaptureDependencies_v2
#endif

cudaError_t tail_of(cudaStream_t stream, Tail *tail) {
  cudaStreamCaptureStatus status;
  unsigned long long id;
  RETURN_IF_ERROR(STREAM_GET_CAPTURE_INFO(stream, &status, &id, &tail->graph, &tail->nodes,
                                          &tail->edges, &tail->count));
  return status == cudaStreamCaptureStatusActive ? cudaSuccess : cudaErrorIllegalState;
}

}  // namespace

int coserve_safepoints_begin_pass(cudaStream_t stream, const CoserveSafepoints *safepoints) {
  begin_pass<<<1, 1, 0, stream>>>(safepoints->stopped_before);
  return cudaGetLastError();
}

int coserve_safepoint_begin_body(cudaStream_t stream, cudaStream_t body_stream,
                                 const CoserveSafepoints *safepoints, int32_t layer,
                                 CoserveSafepointBody *body) {
  Tail tail;
  RETURN_IF_ERROR(tail_of(stream, &tail));
  cudaGraphConditionalHandle body_runs;
  RETURN_IF_ERROR(
      cudaGraphConditionalHandleCreate(&body_runs, tail.graph, 1, cudaGraphCondAssignDefault));
  decide<<<1, 1, 0, stream>>>(body_runs, *safepoints, layer);
  RETURN_IF_ERROR(cudaGetLastError());

  // The node follows the decision.
  RETURN_IF_ERROR(tail_of(stream, &tail));
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = body_runs;
  params.conditional.type = cudaGraphCondTypeIf;
  params.conditional.size = 1;
  cudaGraphNode_t node;
  RETURN_IF_ERROR(GRAPH_ADD_NODE(&node, tail.graph, tail.nodes, tail.edges, tail.count, &params));
  RETURN_IF_ERROR(STREAM_UPDATE_CAPTURE_DEPENDENCIES(stream, &node, nullptr, 1,
                                                     cudaStreamSetCaptureDependencies));
  body->stream = body_stream;
  body->graph = params.conditional.phGraph_out[0];
  return cudaStreamBeginCaptureToGraph(body_stream, body->graph, nullptr, nullptr, 0,
                                       cudaStreamCaptureModeThreadLocal);
}

int coserve_safepoint_end_body(const CoserveSafepointBody *body) {
  cudaGraph_t captured;
  RETURN_IF_ERROR(cudaStreamEndCapture(body->stream, &captured));
  return captured == body->graph ? cudaSuccess : cudaErrorStreamCaptureUnmatched;
}
