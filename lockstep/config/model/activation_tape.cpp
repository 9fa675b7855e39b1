// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/activation_tape.h"

#include <set>
#include <utility>

namespace lockstep::config {

void Tape::record(Node node) {
  if (products_ && !products_->second_call && !node.saved.empty()) {
    products_->needed = products_->kept.size();
  }
  if (!records_) return;
  if (stores_) {
    const std::set<Buffer> saved(node.saved.begin(), node.saved.end());
    for (const Buffer& buffer : saved) node.stored += buffer ? *buffer : 0;
    node.saved.clear();
  }
  entries_.push_back({.node = std::move(node)});
}

void Tape::fork() {
  if (records_) entries_.push_back({.kind = Kind::fork});
}

void Tape::join() {
  if (records_) entries_.push_back({.kind = Kind::join});
}

Buffer Tape::recompute(const Buffer& input, const Forward& function, bool keeps_products) {
  Tape unrecorded(ledger_, false);
  if (keeps_products) unrecorded.products_ = std::make_shared<Products>();
  Buffer output = function(unrecorded);
  if (keeps_products) unrecorded.products_->kept.resize(unrecorded.products_->needed);
  if (records_) {
    entries_.push_back({.kind = Kind::recompute,
                        .node = {.saved = {input}},
                        .again = function,
                        .products = unrecorded.products_});
  }
  return output;
}

Buffer Tape::product(int64_t bytes) {
  if (!products_) return take(bytes);
  if (products_->second_call) {
    return products_->next < products_->kept.size() ? products_->kept[products_->next++] : take(0);
  }
  products_->kept.push_back(take(bytes));
  return products_->kept.back();
}

void Tape::make_weights(int64_t bytes, WeightGradients weights) {
  Buffer made = ledger_.take(bytes);
  if (weights == WeightGradients::kept) weights_.push_back(std::move(made));
}

Buffer Tape::run(Buffer gradient, bool whole, WeightGradients weights) {
  std::vector<Buffer> waiting;  // gradients of the first terms of sums
  for (size_t i = entries_.size(); i-- > 0;) {
    Entry& entry = entries_[i];
    Node& node = entry.node;
    switch (entry.kind) {
      case Kind::join:
        waiting.push_back(gradient);
        break;
      case Kind::fork:
        gradient = std::move(waiting.back());
        waiting.pop_back();
        break;
      case Kind::recompute: {
        entry.inner = std::make_shared<Tape>(ledger_);
        if (entry.products) {
          entry.products->second_call = true;
          entry.inner->products_ = entry.products;
        }
        entry.again(*entry.inner);
        gradient = entry.inner->run(std::move(gradient), whole, weights);
        if (!whole) break;
        for (Buffer& made : entry.inner->weights_) weights_.push_back(std::move(made));
        entry.inner.reset();
        entry.again = {};  // it holds its input
        entry.products.reset();
        node.saved.clear();
        break;
      }
      case Kind::plain: {
        const Buffer loaded = ledger_.take(node.stored);
        Buffer next = node.in_place       ? (node.stored > 0 ? loaded : node.saved[0])
                      : node.gradient > 0 ? ledger_.take(node.gradient)
                                          : gradient;
        {
          const Buffer made = ledger_.take(whole ? node.weights : 0);
          const Buffer extra = ledger_.take(node.extra);
        }
        if (whole) {
          node.saved.clear();
        } else if (node.weights > 0) {
          entry.gradient = gradient;
        }
        gradient = std::move(next);
        if (whole && node.weights > 0) make_weights(node.weights, weights);
      }
    }
  }
  return gradient;
}

Buffer Tape::backward(Buffer gradient, WeightGradients weights) {
  return run(std::move(gradient), true, weights);
}

Buffer Tape::backward_input(Buffer gradient) {
  return run(std::move(gradient), false, WeightGradients::dropped);
}

void Tape::release_after_input() {
  for (Entry& entry : entries_) {
    if (entry.inner) entry.inner->release_after_input();
    if (entry.node.weights == 0 && !entry.inner) entry.node.saved.clear();
  }
}

void Tape::backward_weight(WeightGradients weights) {
  for (size_t i = entries_.size(); i-- > 0;) {
    Entry& entry = entries_[i];
    if (entry.inner) {
      entry.inner->backward_weight(weights);
      for (Buffer& made : entry.inner->weights_) weights_.push_back(std::move(made));
      entry.inner->weights_.clear();
      entry.again = {};
      entry.products.reset();
    } else if (entry.node.weights > 0) {
      const Buffer loaded = ledger_.take(entry.node.stored);
      make_weights(entry.node.weights, weights);
    }
    entry.node.saved.clear();
  }
}

}  // namespace lockstep::config
