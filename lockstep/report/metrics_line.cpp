// SPDX-License-Identifier: Apache-2.0
#include "lockstep/report/metrics_line.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace lockstep::report {
namespace {

constexpr size_t kMostRanks = 1024;

// Called by the parser for each part of the line.
class Handler : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Handler(MetricsLine& line) : line_(line) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t value) override { return take(static_cast<double>(value)); }
  bool number_unsigned(uint64_t value) override { return take(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) override { return take(value); }
  bool string(std::string&) override { return true; }
  bool binary(nlohmann::json::binary_t&) override { return true; }
  bool start_object(size_t) override {
    if (depth_ == 0) is_object_ = true;
    in_split_ = depth_ == 1 && key_ == "split";
    return ++depth_ <= kDeepest;
  }
  bool end_object() override {
    in_split_ = false;
    --depth_;
    return true;
  }
  bool start_array(size_t) override {
    list_ = depth_ != 1                 ? nullptr
            : key_ == "busy_ms"         ? &line_.busy_ms
            : key_ == "rank_peak_bytes" ? &line_.peak_bytes
                                        : nullptr;
    return ++depth_ <= kDeepest;
  }
  bool end_array() override {
    list_ = nullptr;
    --depth_;
    return true;
  }
  bool key(std::string& name) override {
    key_.swap(name);
    if (depth_ == 1) {
      line_.has_loss |= key_ == "loss";
      line_.is_validation |= key_ == "validation_loss";
    }
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

  bool is_object() const { return is_object_; }

 private:
  static constexpr int kDeepest = 32;

  bool take(double value) {
    if (list_ != nullptr && depth_ == 2) {
      if (list_->size() < kMostRanks) list_->push_back(value);
    } else if (depth_ == 1) {
      const auto found = std::ranges::find(kColumnNames, key_);
      if (found != kColumnNames.end())
        line_.values[static_cast<size_t>(found - kColumnNames.begin())] = value;
      if (key_ == "validation_loss") line_.validation_loss = value;
    } else if (in_split_ && depth_ == 2 && key_.ends_with("_ms")) {
      const auto found =
          std::ranges::find(kSplitNames, std::string_view(key_).substr(0, key_.size() - 3));
      if (found != kSplitNames.end())
        line_.values[kCompute + static_cast<size_t>(found - kSplitNames.begin())] = value;
    }
    return true;
  }

  MetricsLine& line_;
  std::string key_;
  std::vector<double>* list_ = nullptr;
  int depth_ = 0;
  bool in_split_ = false, is_object_ = false;
};

}  // namespace

bool MetricsLine::parse(std::string_view line) {
  values.fill(kNone);
  has_loss = is_validation = false;
  validation_loss = kNone;
  busy_ms.clear();
  peak_bytes.clear();
  Handler handler(*this);
  return nlohmann::json::sax_parse(line.begin(), line.end(), &handler) && handler.is_object();
}

}  // namespace lockstep::report
