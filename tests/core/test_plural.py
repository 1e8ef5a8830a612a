from gyrostat.core.plural import numbered, plural, plural_range


def test_one_has_no_s() -> None:
    assert plural(0, "worker") == "0 workers"
    assert plural(1, "worker") == "1 worker"
    assert plural(20_562, "job") == "20,562 jobs"
    assert plural(1, "process", "processes") == "1 process"
    assert plural(2, "process", "processes") == "2 processes"


def test_a_range_of_one_number_is_that_number() -> None:
    assert plural_range(1, 1, "device") == "1 device"
    assert plural_range(1, 4, "device") == "1 to 4 devices"


def test_things_with_numbers() -> None:
    assert numbered("worker", [2]) == "worker 2"
    assert numbered("worker", [0, 2]) == "workers 0, 2"
