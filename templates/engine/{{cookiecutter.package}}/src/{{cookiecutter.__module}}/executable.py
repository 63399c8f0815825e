{% include cookiecutter.__way ~ "/executable.py" %}
