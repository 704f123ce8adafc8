// Memory for floats that is kept from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace firsttoken {

constexpr int64_t kFloatsOfLine = 16;

// From row to row, in floats: whole cache lines, and an odd number of them. With a power of two
// the lines of one column would all fall into a few sets of the cache, and push each other out.
inline int64_t row_stride(int64_t size) {
  return ((size + kFloatsOfLine - 1) / kFloatsOfLine | 1) * kFloatsOfLine;
}

// Begins at a cache line. Growing loses the contents.
class FloatBuffer {
 public:
  // At least `size` floats; zeros at first, so that lanes nobody reads hold nothing wild.
  float* reserve(int64_t size) {
    if (size > capacity_) {
      capacity_ = (size + kFloatsOfLine - 1) / kFloatsOfLine * kFloatsOfLine;
      const auto bytes = static_cast<size_t>(capacity_) * sizeof(float);
      data_.reset(static_cast<float*>(std::aligned_alloc(kLineBytes, bytes)));
      for (int64_t i = 0; i < capacity_; ++i) data_.get()[i] = 0.0f;
    }
    return data_.get();
  }

  float* data() const { return data_.get(); }

 private:
  static constexpr size_t kLineBytes = 64;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };

  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

}  // namespace firsttoken
