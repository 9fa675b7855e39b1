// SPDX-License-Identifier: Apache-2.0
// How gradients, weights and updates of each layer are. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/config/model/model_spec.h"
#include "lockstep/io/json.h"
#include "lockstep/parallel/pipeline/pipeline.h"

namespace lockstep::train {

// The numbers are those of the whole model, however ranks share it.
class Health {
 public:
  explicit Health(const config::ModelSpec& model);

  // After backward, before gradients are clipped. Keeps a copy of the weights of this rank.
  void before_update(const parallel::Pipeline& pipeline);
  // After the optimizer's step: "layers", and lists with a number for each: "grad_norm",
  // "grad_max", "grad_zeros" (their share), "weight_norm", "weight_max", "update_ratio" (norm of
  // the update over norm of the weights). The same on all ranks. Collective.
  io::OrderedJson after_update(const parallel::Pipeline& pipeline);

 private:
  struct Number {
    int64_t row = 0, column = 0;
    at::Tensor value = {};  // on the parameter's device
  };

  int64_t row_of(const std::string& parameter) const;

  std::vector<std::string> layers_;
  std::map<std::string, int64_t> rows_;
  std::vector<double> counts_;       // of the gradients of each layer
  std::vector<Number> numbers_;      // of parameters; fetched at once, for a device's sake
  std::vector<at::Tensor> weights_;  // before the update, in the order of counted_parameters()
};

}  // namespace lockstep::train
