// SPDX-License-Identifier: Apache-2.0
// Attention of one long row, forward and backward, by ranks that share it: in a ring of zig-zag
// chunks, in a ring of neighbouring chunks, and with gathered keys, in turn. Ideal is the time of
// one rank alone divided by their number.
//
//   lockstep run -n N build/bin/bench_context [LENGTH HEADS KV_HEADS WIDTH ROUNDS]
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "lockstep/lockstep.h"
#include "lockstep/nn/context/ring_attention.h"
#include "lockstep/nn/document_attention.h"

using namespace lockstep;

namespace {

std::array<int64_t, 2> neighbouring(int, int rank) { return {2 * rank, 2 * rank + 1}; }

struct Heads {
  at::Tensor q, k, v, grad;

  Heads(int64_t heads, int64_t kv_heads, int64_t tokens, int64_t width) {
    const auto some = [&](int64_t count) { return at::randn({1, count, tokens, width}); };
    q = some(heads).set_requires_grad(true);
    k = some(kv_heads).set_requires_grad(true);
    v = some(kv_heads).set_requires_grad(true);
    grad = some(heads);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const int64_t length = number(1, 8192), heads = number(2, 8), kv_heads = number(3, 2);
  const int64_t width = number(4, 64), rounds = number(5, 5);
  const comm::Group group = comm::init();
  const comm::CoreShare share = comm::share_of_cores(group);
  comm::bind_to_cores(share);
  at::set_num_threads(share.threads);
  const int ranks = group.size();
  const at::Tensor positions = at::arange(length, at::kLong).unsqueeze(0);
  const nn::Documents alone = nn::documents_of(positions, at::kCPU);
  const nn::Documents gathered = nn::documents_of(positions, at::kCPU, 0, {group, false});
  const auto ring = [&](nn::ChunksOf chunks_of) {
    return std::make_shared<const nn::Ring>(
        nn::plan_ring(alone.starts, 1, 0, group, at::kCPU, chunks_of));
  };
  const auto zig_zag = ring(nn::zig_zag_chunks), plain = ring(neighbouring);
  const Heads whole(heads, kv_heads, length, width), part(heads, kv_heads, length / ranks, width);

  // Seconds until the last rank has ended.
  const auto seconds = [&](const Heads& in, const std::function<at::Tensor()>& attend) {
    comm::barrier(group).wait();
    const auto begin = std::chrono::steady_clock::now();
    if (attend) attend().backward(in.grad);
    comm::barrier(group).wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  double one = 1e9, times[3] = {1e9, 1e9, 1e9};
  for (int64_t round = 0; round < rounds; ++round) {
    const auto keep_least = [](double& least, double time) { least = std::min(least, time); };
    keep_least(one, seconds(
                        whole, group.rank() > 0 ? std::function<at::Tensor()>() : [&] {
                          return nn::document_attention(whole.q, whole.k, whole.v, alone);
                        }));
    keep_least(times[0],
               seconds(part, [&] { return nn::ring_attention(part.q, part.k, part.v, zig_zag); }));
    keep_least(times[1],
               seconds(part, [&] { return nn::ring_attention(part.q, part.k, part.v, plain); }));
    keep_least(times[2], seconds(part, [&] {
                 return nn::document_attention(part.q, part.k, part.v, gathered);
               }));
  }
  if (group.rank() > 0) return 0;
  std::printf(
      "%d ranks, %d threads each, %lld tokens, %lld heads (%lld of keys) of %lld: alone %.0f ms\n",
      ranks, share.threads, static_cast<long long>(length), static_cast<long long>(heads),
      static_cast<long long>(kv_heads), static_cast<long long>(width), 1e3 * one);
  const char* const names[] = {"ring, zig-zag", "ring, neighbouring chunks", "gather"};
  for (int i = 0; i < 3; ++i) {
    std::printf("%-26s %8.1f ms  %5.1f %% of ideal\n", names[i], 1e3 * times[i],
                100 * one / ranks / times[i]);
  }
}
