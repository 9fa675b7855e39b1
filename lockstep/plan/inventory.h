// The tensors of a model, counted.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/config/model_spec.h"

namespace lockstep::plan {

// Of the numbers of elements of some tensors. The median of an even number is the mean of the two
// in the middle.
struct Statistics {
  int64_t count = 0, elements = 0;
  double mean = 0, median = 0;
  int64_t min = 0, max = 0;
  int64_t bytes = 0;

  bool operator==(const Statistics&) const = default;
};
Statistics statistics_of(std::vector<int64_t> elements, int64_t element_bytes);

// Tensors of a kind: "embed", "blocks.mlp.up", "norms", "biases", ..., in the order of the model.
struct InventoryKind {
  std::string name;
  Statistics statistics;
};
std::vector<InventoryKind> inventory_of(std::span<const config::TensorSpec> tensors,
                                        int64_t element_bytes);

// A line for each kind and one for all.
std::string inventory_table(std::span<const config::TensorSpec> tensors, int64_t element_bytes);
// A line for each tensor; the owner is layout::PartitionMap's.
std::string tensor_list(std::span<const config::TensorSpec> tensors, int64_t element_bytes,
                        int world);

}  // namespace lockstep::plan
