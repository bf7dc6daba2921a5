"""`turnout ab`: what a change does to the answers and to the speed."""
