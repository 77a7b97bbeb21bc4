// The operators that read whole rows of logits (argmax, topk) against naive references in
// double, on every instruction set of this machine: odd sizes, ties, infinities and NaN.
#include "ops_reference.hpp"

#include "ops/topk/op.hpp"

using namespace ops_test;

TEST(argmax_takes_the_first_of_the_largest) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (int64_t n : {1, 3, 31, 33, 577, 1500}) {
                const int64_t rows = 9;
                const Tensor values = random_tensor({rows, n}, dtype);
                for (int64_t j = 0; j < n; ++j) {
                    set(values, 1 * n + j, kNan);
                    set(values, 2 * n + j, -kInf);
                    set(values, 3 * n + j, j % 3 == 0 ? kNan : float(j % 5));
                    set(values, 4 * n + j, -kInf);
                    set(values, 5 * n + j, j + 1 == n ? -kInf : kNan);
                }
                set(values, 6 * n + n / 2, kInf);
                set(values, 6 * n + n - 1, kInf);
                const Tensor index = Tensor::create({rows}, kI64);
                const Tensor value = Tensor::create({rows}, dtype);
                ops::argmax(two_threads(), index, value, values);
                for (int64_t r = 0; r < rows; ++r) {
                    int64_t best = -1;
                    for (int64_t j = 0; j < n; ++j) {
                        const double x = get(values, r * n + j);
                        if (!std::isnan(x) && (best < 0 || x > get(values, r * n + best))) {
                            best = j;
                        }
                    }
                    best = std::max<int64_t>(best, 0);
                    CHECK_EQ(index.as<int64_t>()[r], best);
                    check_close("argmax", get(value, r), get(values, r * n + best), 0);
                }
            }
        }
    });
    const Tensor values = Tensor::create({2, 3}, kF32);
    const Tensor index = Tensor::create({2}, kI64);
    const Tensor value = Tensor::create({2}, kF32);
    const Stream &s = one_thread();
    CHECK_THROWS(ops::argmax(s, value, value, values), "argmax", "max_index", "f32", "i64");
    CHECK_THROWS(ops::argmax(s, index, Tensor::create({2}, kF16), values), "argmax", "max_value");
    CHECK_THROWS(ops::argmax(s, index, value, Tensor::create({2, 0}, kF32)), "argmax", "values");
}

TEST(topk_is_sorted_and_takes_the_first_on_a_tie) {
    for_each_isa([] {
        for (int64_t n : {1, 3, 31, 577, 5000}) {
            for (int64_t k : {int64_t(1), int64_t(3), n / 2, n}) {
                if (k < 1 || k > n) {
                    continue;
                }
                const Tensor values = random_tensor({3, n}, kF32);
                for (int64_t j = 0; j < n; ++j) {
                    set(values, n + j, float(random_int(0, 5)));
                    set(values, 2 * n + j, j % 3 == 0 ? kNan : j % 3 == 1 ? -kInf : float(j % 7));
                }
                const Tensor index = Tensor::create({3, k}, kI32);
                const Tensor value = Tensor::create({3, k}, kF32);
                ops::topk(two_threads(), index, value, values);
                for (int64_t r = 0; r < 3; ++r) {
                    std::vector<std::pair<double, int64_t>> all;
                    for (int64_t j = 0; j < n; ++j) {
                        const double x = get(values, r * n + j);
                        all.push_back({std::isnan(x) ? kInf : -x, j});
                    }
                    std::sort(all.begin(), all.end());
                    for (int64_t i = 0; i < k; ++i) {
                        CHECK_EQ(index.as<int32_t>()[r * k + i], all[size_t(i)].second);
                        CHECK_EQ(get(value, r * k + i), -all[size_t(i)].first);
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor values = Tensor::create({1, 3}, kF32);
    CHECK_THROWS(ops::topk(s, Tensor::create({1, 4}, kI32), Tensor::create({1, 4}, kF32), values),
                 "topk", "4", "3");
    CHECK_THROWS(ops::topk(s, Tensor::create({1, 2}, kI64), Tensor::create({1, 2}, kF32), values),
                 "topk", "index", "i64", "i32");
}
