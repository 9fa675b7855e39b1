// SPDX-License-Identifier: Apache-2.0
// Matchers that are compiled once for each type of element or error, not once for each list and
// each lambda. gmock instantiates about a hundred functions for every EXPECT_THAT([&] { ... },
// ThrowsMessage<...>(...)) and for every length of ElementsAre(...): half of the time that tests
// take to compile. The precompiled headers of tests have this file; without it, tests do the same.
#pragma once

#include <gmock/gmock.h>

#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>

namespace testing {
namespace internal {

// A lambda, whatever its type is.
class AnyCall {
 public:
  template <class Call>
  explicit AnyCall(const Call& call)
      : object_(std::addressof(call)), invoke_([](const void* object) {
          static_cast<void>((*static_cast<const Call*>(object))());
        }) {}
  void operator()() const { invoke_(object_); }

 private:
  const void* object_;
  void (*invoke_)(const void*);
};

// What EXPECT_THAT(lambda, Throws...) compares with.
template <class Error>
class PredicateFormatterFromMatcher<PolymorphicMatcher<ExceptionMatcherImpl<Error>>> {
 public:
  using Thrown = PolymorphicMatcher<ExceptionMatcherImpl<Error>>;
  explicit PredicateFormatterFromMatcher(Thrown thrown) : thrown_(std::move(thrown)) {}

  template <class Call>
  AssertionResult operator()(const char* text, const Call& call) const {
    if constexpr (std::is_class_v<Call>) {
      return compare(text, AnyCall(call));
    } else {
      const auto through = [&] { call(); };
      return compare(text, AnyCall(through));
    }
  }

 private:
  AssertionResult compare(const char* text, const AnyCall& call) const {
    return MakePredicateFormatterFromMatcher(Matcher<const AnyCall&>(thrown_))(text, call);
  }

  const Thrown thrown_;
};

// bool is left to gmock: a vector of them has no elements to refer to.
template <class First, class... Rest>
constexpr bool kOneType =
    !std::is_same_v<First, bool> &&
    (std::is_same_v<std::decay_t<const First&>, std::decay_t<const Rest&>> && ...);

template <class First>
using ListOf = ElementsAreArrayMatcher<std::decay_t<const First&>>;

}  // namespace internal

// Elements that are all written as one type, as nearly all are.
template <class First, class... Rest, std::enable_if_t<internal::kOneType<First, Rest...>, int> = 0>
internal::ListOf<First> ElementsAre(const First& first, const Rest&... rest) {
  const std::initializer_list<std::decay_t<const First&>> elements{first, rest...};
  return {elements.begin(), elements.end()};
}

}  // namespace testing
