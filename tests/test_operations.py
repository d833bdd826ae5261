"""What is counted in a compiled program's text."""

from specjax.measure.operations import counted_loops_of, kernels_of, operations_of

PROGRAM = """HloModule jit_f

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %sin = f32[8]{0} sine(%p)
  ROOT %cos = f32[8]{0} cosine(%sin)
}

%small (p: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %negate = f32[8]{0} negate(%p.1)
}

%large (p: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %copy.1 = f32[8]{0} copy(%p.2)
  ROOT %called = f32[8]{0} call(%copy.1), to_apply=%small
}

%b (at: (s32[], /*index=1*/f32[8])) -> (s32[], f32[8]) {
  %at = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%at), index=1
  %sum = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit/step/draft/pass/s"}
  %product = f32[8]{0} custom-call(%sum), metadata={op_name="jit/step/score/dot"}
  ROOT %made = (s32[], f32[8]{0}) tuple(%i, %product)
}

%c (at: (s32[], f32[8])) -> pred[] {
  %at.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop = f32[8]{0} while(%a), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"7"}}
  %other = (s32[], f32[8]{0}) while(%loop), condition=%c, body=%b
  %branch = f32[8]{0} conditional(%which, %a, %a), branch_computations={%small, %large}
  ROOT %end = f32[8]{0} fusion(%branch), kind=kLoop, calls=%fused
}
"""


def test_kernels_are_counted_as_often_as_their_loops_run_and_by_the_part_of_a_step():
    outside = 8 + 2 + 1  # comparisons, the longer branch, the last one
    assert kernels_of(PROGRAM) == {
        "drafts' passes": 8, "target's passes": 8, "outside the steps": outside
    }  # fmt: skip
    assert counted_loops_of(PROGRAM) == 1


def test_what_is_inside_a_fused_kernel_is_no_operation_that_is_counted():
    assert operations_of(PROGRAM) == {
        "while": 2, "conditional": 1, "custom-call": 1, "fusion": 2, "copy": 1
    }  # fmt: skip
