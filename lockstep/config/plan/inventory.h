// SPDX-License-Identifier: Apache-2.0
// The tensors of a model, counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/config/train_config.h"
#include "lockstep/layout/placement.h"

namespace lockstep::config {

// The tensors of a built-in model, with elements of so many bytes.
layout::ModelParameters model_parameters(std::span<const TensorSpec> tensors,
                                         int64_t element_bytes);

// Tensors of a kind: "embed", "blocks.mlp.up", "norms", "biases", ..., in the order of the model.
struct InventoryKind {
  std::string name;
  layout::ParameterStatistics statistics;
};
std::vector<InventoryKind> inventory_of(std::span<const TensorSpec> tensors, int64_t element_bytes);

// A line for each kind and one for all.
std::string inventory_table(std::span<const TensorSpec> tensors, int64_t element_bytes);
// For each of model.tensors() the ranks, ascending, that keep some of it from step to step and
// update it. Ranks of a group that shares parameters have rows of it, cut where the parameters of a
// unit, end to end, are cut, or whole tensors (parallel.shard_granularity); small tensors and
// models that are not sharded are whole on each rank. The copy of a tied embedding in a pipeline's
// last stage counts as no owner.
std::vector<std::vector<size_t>> owners_of(const TrainConfig& config, const ModelSpec& model,
                                           int world);
// A line for each tensor, with its owners.
std::string tensor_list(const TrainConfig& config, const ModelSpec& model, int world);

// A line for each group of more than one rank, "dp_group_tp0_pp1  1, 3": the ids that errors and
// traces of a run have. Nothing for one rank.
std::string group_list(const TrainConfig& config, int world);

}  // namespace lockstep::config
