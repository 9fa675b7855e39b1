// SPDX-License-Identifier: Apache-2.0
// Memory of a forward and a backward pass, without values: buffers are numbers of bytes, and the
// tape says what autograd keeps and makes. Private: not installed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep::config {

// Bytes that are in use, and the most that were. Buffers must not outlive it.
class Ledger {
 public:
  // Its size, in use until the last copy goes.
  using Buffer = std::shared_ptr<const int64_t>;
  Buffer take(int64_t bytes) {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
    return {new int64_t(bytes), [this](const int64_t* taken) {
              now_ -= *taken;
              delete taken;
            }};
  }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_; }

 private:
  int64_t now_ = 0, peak_ = 0;
};

using Buffer = Ledger::Buffer;

// What an operator leaves for backward, and what its backward takes.
struct Node {
  std::vector<Buffer> saved = {};
  int64_t stored = 0;  // bytes that were saved and are on disk, until its backward needs them
  // Bytes of the gradient of its input. 0: it is that of the output, seen in another shape.
  int64_t gradient = 0;
  int64_t extra = 0;      // bytes that backward needs in addition to gradients and saved tensors
  int64_t weights = 0;    // bytes of gradients of its parameters
  bool in_place = false;  // the gradient is written over what was saved
};

// What becomes of the gradients of parameters.
enum class WeightGradients { dropped, kept };

class Tape {
 public:
  using Forward = std::function<Buffer(Tape&)>;

  // With `records` off nothing is kept: what a function does that is computed again later.
  explicit Tape(Ledger& ledger, bool records = true) : ledger_(ledger), records_(records) {}

  Buffer take(int64_t bytes) { return ledger_.take(bytes); }
  void record(Node node);
  // What is recorded from here on is saved to a disk.
  void store_saved() { stores_ = true; }

  // x + f(x): fork before f, join when the sum is made. The gradient of x is the sum of two,
  // written over the first.
  void fork();
  void join();
  // Keeps `input` instead of what the function would, and calls it again in backward. With
  // `keeps_products` its products are kept as well, up to the last that the second call needs.
  Buffer recompute(const Buffer& input, const Forward& function, bool keeps_products = false);
  // The result of a matrix product or of attention.
  Buffer product(int64_t bytes);
  // What computing it takes for a moment.
  void touch_for_product(int64_t bytes) {
    if (!products_ || !products_->second_call) ledger_.take(bytes);
  }

  // Returns the gradient of the first input.
  Buffer backward(Buffer gradient, WeightGradients weights);
  // The same in two halves: gradients of inputs, and later those of parameters. Between them only
  // what the second needs is kept: inputs of operators with parameters, and their gradients.
  Buffer backward_input(Buffer gradient);
  void release_after_input();
  void backward_weight(WeightGradients weights);

 private:
  enum class Kind { plain, fork, join, recompute };
  // Of a function that is computed again, as parallel::detail::KeptProducts has them.
  struct Products {
    std::vector<Buffer> kept;
    size_t needed = 0, next = 0;
    bool second_call = false;
  };
  struct Entry {
    Kind kind = Kind::plain;
    Node node = {};
    Forward again = {};
    std::shared_ptr<Products> products = {};
    std::shared_ptr<Tape> inner = {};
    Buffer gradient = {};  // of the output, for the second half
  };

  Buffer run(Buffer gradient, bool whole, WeightGradients weights);
  void make_weights(int64_t bytes, WeightGradients weights);

  Ledger& ledger_;
  bool records_;
  bool stores_ = false;
  std::shared_ptr<Products> products_ = {};
  std::vector<Entry> entries_;
  std::vector<Buffer> weights_;
};

}  // namespace lockstep::config
