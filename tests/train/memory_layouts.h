// SPDX-License-Identifier: Apache-2.0
// The layouts whose memory is predicted and measured.
#pragma once

#include <functional>
#include <ostream>
#include <vector>

#include "lockstep/config/train_config.h"
#include "lockstep/nn/kernels/can_multiply.h"

namespace lockstep::train {

using config::ModelKind;
using config::TrainConfig;
using layout::MemoryStrategy;
using layout::PipelineSchedule;
using layout::Recompute;
using layout::ShardingStrategy;

struct Layout {
  const char* name;
  int ranks;
  std::function<void(TrainConfig&)> set;
};

inline void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

// Small blocks and long rows, so that activations are a large part.
inline TrainConfig base() {
  TrainConfig config;
  config.data.path = "any";
  config.model.layers = 4;
  config.model.hidden = 128;
  config.model.heads = 4;
  config.model.vocab = 512;
  config.train.seq_len = 192;
  config.train.micro_batch = 2;
  config.train.device = config::DeviceKind::cpu;
  return config;
}

inline void llama(TrainConfig& config) {
  config.model.kind = ModelKind::llama;
  config.model.kv_heads = 2;
}

inline void qwen3(TrainConfig& config) {
  llama(config);
  config.model.qk_norm = true;
  config.model.head_dim = 48;
}

// With sequence parallelism.
inline void tensor(TrainConfig& config) {
  config.parallel.tp = 2;
  config.parallel.sequence_parallel = true;
}

inline void context(TrainConfig& config, config::ContextKind kind) {
  config.parallel.cp = 2;
  config.parallel.context = kind;
  config.train.seq_len = 384;
}

inline void fp8(TrainConfig& config) {
  config.train.precision = config::Precision::fp8;
  config.train.dtype = config::Precision::float32;
  config.train.fp8_min = 0;
}

inline void tiles(TrainConfig& config) {
  config.train.seq_len = 512;
  config.train.tile = 64;
}

inline void pipeline(TrainConfig& config, PipelineSchedule schedule, int chunks = 1) {
  config.parallel.pp = 2;
  config.parallel.schedule = schedule;
  config.parallel.chunks = chunks;
  config.train.global_batch = 8;  // four micro-batches
}

// Larger blocks, because memory is taken in whole pages. The site is given: what would be measured
// is not part of a step.
inline void offload(TrainConfig& config) {
  config.model.hidden = 256;
  config.train.seq_len = 64;
  config.offload = {.device_limit = 96 << 20,
                    .advanced = {.strategy = layout::OffloadStrategy::extreme,
                                 .update_site = layout::UpdateSite::cpu}};
}

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all{
      {"gpt", 1, [](auto&) {}},
      {"gpt_untied", 1, [](auto& c) { c.model.tied = false; }},
      {"gpt_large_vocabulary", 1, [](auto& c) { c.model.vocab = 8192; }},
      {"gpt_one_row", 1,
       [](auto& c) {
         c.train.micro_batch = 1;
         c.train.seq_len = 256;
       }},
      {"gpt_dropout", 1, [](auto& c) { c.model.dropout = 0.1; }},
      {"gpt_micro_batches", 1, [](auto& c) { c.train.global_batch = 8; }},
      {"gpt_selective", 1, [](auto& c) { c.train.recompute = Recompute::selective; }},
      {"gpt_fit", 1,
       [](auto& c) {
         c.train.fit = config::RecomputedBlocks{1, 1};
       }},
      {"gpt_full", 1, [](auto& c) { c.train.recompute = Recompute::full; }},
      {"gpt_reproducible", 1,
       [](auto& c) {
         c.train.reproducible = true;
         c.train.global_batch = 8;
       }},
      {"llama", 1, [](auto& c) { llama(c); }},
      {"llama_selective", 1,
       [](auto& c) {
         llama(c);
         c.train.recompute = Recompute::selective;
       }},
      {"llama_full", 1,
       [](auto& c) {
         llama(c);
         c.train.recompute = Recompute::full;
       }},
      {"qwen2_window", 1,
       [](auto& c) {
         llama(c);
         c.model.qkv_bias = true;
         c.model.window = 50;
       }},
      {"qwen3", 1, [](auto& c) { qwen3(c); }},
      {"qwen3_selective", 1,
       [](auto& c) {
         qwen3(c);
         c.train.recompute = Recompute::selective;
       }},
      {"gpt_tiles", 1, [](auto& c) { tiles(c); }},
      {"llama_fp8", 1,
       [](auto& c) {
         llama(c);
         fp8(c);
       }},
      {"llama_fp8_selective", 1,
       [](auto& c) {
         llama(c);
         fp8(c);
         c.train.recompute = Recompute::selective;
       }},
      {"llama_tiles_full", 1,
       [](auto& c) {
         llama(c);
         tiles(c);
         c.train.recompute = Recompute::full;
       }},
      {"ddp", 2, [](auto&) {}},
      {"ddp_micro_batches", 2, [](auto& c) { c.train.global_batch = 16; }},
      {"shard_full", 2, [](auto& c) { c.parallel.shard = ShardingStrategy::full_shard; }},
      {"shard_full_micro_batches", 2,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"shard_grad_op_llama", 2,
       [](auto& c) {
         llama(c);
         c.parallel.shard = ShardingStrategy::shard_grad_op;
       }},
      {"shard_optimizer", 2, [](auto& c) { c.parallel.shard = ShardingStrategy::optimizer; }},
      // One tensor more than there are pairs, and far larger than the others.
      {"shard_optimizer_tensors", 2,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::optimizer;
         c.parallel.shard_granularity = layout::ShardGranularity::tensors;
         c.model.vocab = 4096;
       }},
      {"gpipe", 2, [](auto& c) { pipeline(c, PipelineSchedule::gpipe); }},
      {"1f1b", 2, [](auto& c) { pipeline(c, PipelineSchedule::one_f_one_b); }},
      {"1f1b_llama_full", 2,
       [](auto& c) {
         llama(c);
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.train.recompute = Recompute::full;
       }},
      {"interleaved", 2, [](auto& c) { pipeline(c, PipelineSchedule::interleaved, 2); }},
      {"zb_h1", 2, [](auto& c) { pipeline(c, PipelineSchedule::zb_h1); }},
      {"zb_v", 2, [](auto& c) { pipeline(c, PipelineSchedule::zb_v, 2); }},
      {"zb_h1_llama_selective", 2,
       [](auto& c) {
         llama(c);
         pipeline(c, PipelineSchedule::zb_h1);
         c.train.recompute = Recompute::selective;
       }},
      {"tp", 2, [](auto& c) { c.parallel.tp = 2; }},
      {"tp_large_vocabulary", 2,
       [](auto& c) {
         c.parallel.tp = 2;
         c.model.vocab = 8192;
       }},
      {"tp_llama", 2,
       [](auto& c) {
         llama(c);
         c.parallel.tp = 2;
       }},
      {"tp_sequence", 2, [](auto& c) { tensor(c); }},
      {"tp_sequence_llama", 2,
       [](auto& c) {
         llama(c);
         tensor(c);
       }},
      {"tp_sequence_selective", 2,
       [](auto& c) {
         tensor(c);
         c.train.recompute = Recompute::selective;
       }},
      {"tp_llama_full", 2,
       [](auto& c) {
         llama(c);
         c.parallel.tp = 2;
         c.train.recompute = Recompute::full;
       }},
      {"extreme", 1, [](auto& c) { c.memory.strategy = MemoryStrategy::extreme; }},
      {"extreme_selective", 1,
       [](auto& c) {
         c.memory.strategy = MemoryStrategy::extreme;
         c.train.recompute = Recompute::selective;
       }},
      {"extreme_none", 1,
       [](auto& c) {
         c.memory.strategy = MemoryStrategy::extreme;
         c.train.recompute = Recompute::none;
       }},
      {"extreme_pipeline", 2,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.memory.strategy = MemoryStrategy::extreme;
       }},
      {"offload", 1, [](auto& c) { offload(c); }},
      {"offload_params", 1,
       [](auto& c) {
         offload(c);
         c.offload.grads = c.offload.optimizer = false;
         c.offload.advanced.update_site = layout::UpdateSite::automatic;  // where the state is
       }},
      {"offload_grads", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.optimizer = false;
         c.offload.advanced.update_site = layout::UpdateSite::automatic;
       }},
      {"offload_optimizer_cpu", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
       }},
      {"offload_optimizer_device", 1,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
         c.offload.advanced.update_site = layout::UpdateSite::device;
       }},
      {"offload_balanced_codec", 1,
       [](auto& c) {
         offload(c);
         if (nn::can_multiply(at::kBFloat16, at::kCPU)) c.train.dtype = config::Precision::bfloat16;
         c.offload.device_limit = 48 << 20;
         c.offload.advanced.strategy = layout::OffloadStrategy::balanced;
         c.offload.codec = {codec::Codec::quantization, codec::Codec::quantization};
       }},
      {"offload_micro_batches", 1,
       [](auto& c) {
         offload(c);
         c.train.global_batch = 8;
       }},
      {"offload_shards", 2,
       [](auto& c) {
         offload(c);
         c.parallel.shard = ShardingStrategy::full_shard;
       }},
      {"offload_shards_optimizer", 2,
       [](auto& c) {
         offload(c);
         c.offload.params = c.offload.grads = false;
         c.parallel.shard = ShardingStrategy::full_shard;
       }},
      {"offload_interleaved", 2,
       [](auto& c) {
         offload(c);
         pipeline(c, PipelineSchedule::interleaved, 2);
       }},
      {"context_gather", 2, [](auto& c) { context(c, config::ContextKind::gather); }},
      {"context_gather_selective", 2,
       [](auto& c) {
         context(c, config::ContextKind::gather);
         c.train.recompute = Recompute::selective;
       }},
      {"context_ring_llama", 2,
       [](auto& c) {
         llama(c);
         context(c, config::ContextKind::ring);
       }},
      {"tp_pipeline", 4,
       [](auto& c) {
         tensor(c);
         pipeline(c, PipelineSchedule::one_f_one_b);
       }},
      {"tp_shards", 4,
       [](auto& c) {
         tensor(c);
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"shard_hybrid", 4,
       [](auto& c) {
         c.parallel.shard = ShardingStrategy::hybrid_shard;
         c.parallel.shard_size = 2;
       }},
      {"pipeline_of_shards", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.parallel.shard = ShardingStrategy::full_shard;
         c.train.global_batch = 16;
       }},
      {"pipeline_of_whole_tensors", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::interleaved, 2);
         c.parallel.shard = ShardingStrategy::optimizer;
         c.parallel.shard_granularity = layout::ShardGranularity::tensors;
         c.train.global_batch = 16;
       }},
      {"pipeline_of_ddp", 4,
       [](auto& c) {
         pipeline(c, PipelineSchedule::one_f_one_b);
         c.train.global_batch = 16;
       }},
  };
  return all;
}

}  // namespace lockstep::train
