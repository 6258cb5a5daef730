from braintrace.lab._table import aligned


def test_columns_begin_or_end_together():
    rows = [("rule", "about", "ms"), ("bptt", "all of it", 1.25), ("d_rtrl", "", 10)]
    assert aligned(rows, left=2) == [
        "rule    about        ms",
        "bptt    all of it  1.25",
        "d_rtrl               10",
    ]
    assert aligned(rows[1:], gap=" ")[0] == "bptt   all of it 1.25"
